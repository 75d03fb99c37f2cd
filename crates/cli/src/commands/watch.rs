//! `cobox watch`: follows the events in a thread's sandbox, across consecutive sessions of the thread.

use std::time::Duration;

use cobox_client::{Client, ClientError, EventsFrom};
use cobox_protocol::{ErrorCode, SessionId};

use super::{Outcome, parse_thread, session};
use crate::{
    context::Context,
    event_printer::{FeedEnd, print_events},
    failure::Failure,
    printer::visible,
    target::Target,
};

/// Interval between two attempts to find a session, or to reach a broker that was lost.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Waits for the thread's first session, follows later sessions, reconnects if the connection is lost, and stops on Ctrl-C. Watching
does not extend the sandbox's lease. Events are reported by the sandbox and not verified.

Examples:
  cobox watch demo
  cobox watch demo --history
  cobox watch demo --json | jq -r 'select(.type == \"exec\") | .command'
  cobox watch demo --after evt_01j…       resume after this event")]
pub struct WatchArgs {
    /// The thread, or a sandbox's name if no thread has that name [default: COBOX_THREAD, or `default`]
    #[arg(value_name = "THREAD|NAME", value_parser = parse_thread)]
    thread: Option<String>,
    /// Include past events
    #[arg(long, conflicts_with = "after")]
    history: bool,
    /// Include past events after the one with this ID (evt_…)
    #[arg(long, value_name = "EVENT")]
    after: Option<String>,
}

pub async fn run(args: WatchArgs, context: &Context) -> Outcome {
    let client = context.client()?;
    let target = match args.thread {
        Some(name) => context.resolve_name(&name).await?,
        None => Target::default_thread(&|name| std::env::var_os(name)),
    };
    let thread = match target {
        Target::Thread(thread) => thread,
        other => thread_of_sandbox(&client, other.name()).await?,
    };
    let mut from = match args.after {
        Some(id) => EventsFrom::After(id),
        None if args.history => EventsFrom::Start,
        None => EventsFrom::Now,
    };
    let mut waiting_for = String::new();
    let mut has_found_broker = false;
    let mut ended: Option<SessionId> = None;
    loop {
        let session =
            match session::session_of_thread(&client, &thread).await.map(|session| session.filter(|id| Some(id) != ended.as_ref())) {
                Ok(Some(id)) => Ok(id),
                Ok(None) => {
                    // For a session that is created later, every event is new.
                    from = EventsFrom::Start;
                    has_found_broker = true;
                    Err(format!("thread {} has no session; waiting for one", visible(&thread)))
                }
                Err(e) if e.is_retryable() && has_found_broker => Err(format!("cobox: {}; retrying", visible(&e.to_string()))),
                Err(e) => return Err(e.into()),
            };
        let id = match session {
            Ok(id) => id,
            Err(reason) => {
                if reason != waiting_for {
                    context.printer.note(&reason);
                    waiting_for = reason;
                }
                tokio::time::sleep(RETRY_INTERVAL).await;
                continue;
            }
        };
        (has_found_broker, waiting_for) = (true, String::new());
        let mut last = None;
        let stopped = print_events(context.printer, &mut client.events(&id, from.clone()), &mut last).await?;
        if let Some(last) = last {
            from = EventsFrom::After(last);
        }
        match stopped {
            FeedEnd::OutputClosed => return Ok(0),
            FeedEnd::SessionEnded => (ended, from) = (Some(id), EventsFrom::Start),
            FeedEnd::Failed(e) if has_ended(&e) => (ended, from) = (Some(id), EventsFrom::Start),
            FeedEnd::Failed(e) if e.is_retryable() => {
                context.printer.note(&format!("cobox: {}; retrying", visible(&e.to_string())));
                tokio::time::sleep(RETRY_INTERVAL).await;
            }
            FeedEnd::Failed(e) => return Err(e.into()),
        }
    }
}

/// Returns a thread that uses this sandbox: the sandbox's events are recorded in its session.
async fn thread_of_sandbox(client: &Client, sandbox: &str) -> Result<String, Failure> {
    let threads = client.get_sandbox(sandbox).await?.threads;
    threads.into_iter().next().ok_or_else(|| {
        Failure::new(format!("no thread uses sandbox {}, so its events are not recorded", visible(sandbox)))
            .with_advice("bind a thread to it with `cobox session ensure THREAD --sandbox`")
    })
}

fn has_ended(e: &ClientError) -> bool {
    e.is(ErrorCode::SessionNotFound) || e.is(ErrorCode::SessionExpired)
}
