//! Runs the TUI: reads the terminal, updates the state, draws it, and starts its effects.

use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex},
    time::Duration,
};

use crossterm::event::{Event, EventStream};
use futures_util::{FutureExt, StreamExt};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    sync::mpsc,
    time::Instant,
};
use tokio_util::task::AbortOnDropHandle;

use super::{
    app_state::{AppOptions, AppState},
    message::{Effect, Message},
    tasks::Tasks,
    terminal_screen::TerminalScreen,
    view,
};
use crate::{chat::ChatOptions, failure::Failure};

/// Messages buffered for the state. Tasks that produce more than is processed wait.
const QUEUED_MESSAGES: usize = 1024;
/// Messages processed before the next draw: a flood of them must not delay the display of typed keys.
const MAX_BATCH: usize = 256;
/// Minimum interval between two draws: users can't see more frames.
const MIN_FRAME_INTERVAL: Duration = Duration::from_millis(16);

pub async fn run(chat: ChatOptions) -> Result<u8, Failure> {
    // A panic message printed on the alternate screen would be lost when that is left, so it is kept until then.
    let panic_message = Arc::new(Mutex::new(None::<String>));
    let slot = panic_message.clone();
    let previous_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if let Ok(mut slot) = slot.lock() {
            *slot = Some(info.to_string());
        }
    }));
    let outcome = AssertUnwindSafe(run_loop(chat)).catch_unwind().await;
    std::panic::set_hook(previous_hook);
    match outcome {
        Ok(outcome) => outcome,
        Err(_) => {
            let message = panic_message.lock().ok().and_then(|mut slot| slot.take()).unwrap_or_default();
            Err(Failure::new(format!("the TUI crashed: {message}"))
                .with_advice("the thread and sandbox keep running; please report this bug"))
        }
    }
}

async fn run_loop(chat: ChatOptions) -> Result<u8, Failure> {
    let size = crossterm::terminal::size()?;
    let app_options = AppOptions {
        size,
        deployment: chat.deployment.as_ref().map(|d| d.url().to_owned()),
        assistant: chat.assistant.clone(),
        thread: chat.thread.clone(),
        has_broker: chat.broker.is_some(),
        sandbox_choice: chat.sandbox_choice.clone(),
    };
    let has_colour = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let mut termination = TerminationSignals::new()?;
    let (sender, mut messages) = mpsc::channel(QUEUED_MESSAGES);
    let mut tasks = Tasks::new(chat, sender);
    let mut screen = TerminalScreen::enter()?;
    let (mut terminal_events, _reading) = read_terminal();
    let (mut state, effects) = AppState::begin(app_options);
    effects.into_iter().for_each(|effect| tasks.start(effect));
    let mut last_draw: Option<Instant> = None;
    loop {
        if let Some(at) = last_draw {
            tokio::time::sleep_until(at + MIN_FRAME_INTERVAL).await;
        }
        let mut processed = 0;
        while let (true, Ok(message)) = (processed < MAX_BATCH, messages.try_recv()) {
            processed += 1;
            if handle_message(&mut state, &mut tasks, message) {
                return leave(tasks).await;
            }
        }
        // The size may have changed before the resize event arrives.
        let size = crossterm::terminal::size()?;
        if size != state.size {
            handle_message(&mut state, &mut tasks, Message::Resized(size.0, size.1));
        }
        screen.draw(|frame| {
            view::draw(frame, &state);
            if !has_colour {
                view::without_colour(frame);
            }
        })?;
        last_draw = Some(Instant::now());
        let message = tokio::select! {
            message = terminal_events.recv() => match message {
                Some(message) => Some(message),
                // The terminal is gone.
                None => return leave(tasks).await,
            },
            message = messages.recv() => message,
            () = termination.recv() => return leave(tasks).await,
        };
        let mut next = message;
        let mut processed = 0;
        // Keys that arrive together are drawn together.
        while let Some(message) = next.take() {
            if handle_message(&mut state, &mut tasks, message) {
                return leave(tasks).await;
            }
            processed += 1;
            if processed < MAX_BATCH {
                next = terminal_events.try_recv().ok();
            }
        }
    }
}

/// Applies a message and starts the effects. Returns whether the TUI should quit.
fn handle_message(state: &mut AppState, tasks: &mut Tasks, message: Message) -> bool {
    for effect in state.update(message) {
        if effect == Effect::Quit {
            return true;
        }
        tasks.start(effect);
    }
    false
}

async fn leave(tasks: Tasks) -> Result<u8, Failure> {
    tasks.leave().await;
    Ok(0)
}

/// Reads terminal events in a separate task that awaits the stream: a poll that doesn't await it would register no
/// wakeup.
fn read_terminal() -> (mpsc::Receiver<Message>, AbortOnDropHandle<()>) {
    let (sender, receiver) = mpsc::channel(MAX_BATCH);
    let reading = tokio::spawn(async move {
        let mut events = EventStream::new();
        while let Some(Ok(event)) = events.next().await {
            if let Some(message) = translate(event)
                && sender.send(message).await.is_err()
            {
                return;
            }
        }
    });
    (receiver, AbortOnDropHandle::new(reading))
}

fn translate(event: Event) -> Option<Message> {
    match event {
        Event::Key(key) => Some(Message::Key(key)),
        Event::Mouse(mouse) => Some(Message::Mouse(mouse)),
        Event::Paste(text) => Some(Message::Pasted(text)),
        Event::Resize(cols, rows) => Some(Message::Resized(cols, rows)),
        Event::FocusGained | Event::FocusLost => None,
    }
}

struct TerminationSignals([Signal; 3]);

impl TerminationSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self([signal(SignalKind::terminate())?, signal(SignalKind::hangup())?, signal(SignalKind::interrupt())?]))
    }

    async fn recv(&mut self) {
        let [terminated, hung_up, interrupted] = &mut self.0;
        tokio::select! {
            _ = terminated.recv() => {}
            _ = hung_up.recv() => {}
            _ = interrupted.recv() => {}
        }
    }
}
