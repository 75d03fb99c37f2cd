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
    app::{Beginning, State},
    message::{Effect, Message},
    screen::Screen,
    tasks::Tasks,
    view,
};
use crate::{chat::Chat, failure::Failure};

/// Messages buffered for the state. Tasks that produce more than is processed wait.
const MESSAGES: usize = 1024;
/// Messages processed before the next draw: a flood of them must not delay the display of typed keys.
const BATCH: usize = 256;
/// Minimum interval between two draws: users can't see more frames.
const FRAME: Duration = Duration::from_millis(16);

pub async fn run(chat: Chat) -> Result<u8, Failure> {
    // A panic message printed on the alternate screen would be lost when that is left, so it is kept until then.
    let last_words = Arc::new(Mutex::new(None::<String>));
    let kept = last_words.clone();
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if let Ok(mut kept) = kept.lock() {
            *kept = Some(info.to_string());
        }
    }));
    let outcome = AssertUnwindSafe(hold(chat)).catch_unwind().await;
    std::panic::set_hook(before);
    match outcome {
        Ok(outcome) => outcome,
        Err(_) => {
            let said = last_words.lock().ok().and_then(|mut kept| kept.take()).unwrap_or_default();
            Err(Failure::new(format!("the TUI broke: {said}")).with_advice("thread and sandbox live on; please report this"))
        }
    }
}

async fn hold(chat: Chat) -> Result<u8, Failure> {
    let size = crossterm::terminal::size()?;
    let beginning = Beginning {
        size,
        deployment: chat.deployment.as_ref().map(|d| d.url().to_owned()),
        assistant: chat.assistant.clone(),
        thread: chat.thread.clone(),
        has_broker: chat.broker.is_some(),
        wish: chat.wish.clone(),
    };
    let has_colour = std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let mut ending = Ending::new()?;
    let (send, mut messages) = mpsc::channel(MESSAGES);
    let mut tasks = Tasks::new(chat, send);
    let mut screen = Screen::enter()?;
    let (mut typed, _reading) = read_terminal();
    let (mut state, effects) = State::begin(beginning);
    effects.into_iter().for_each(|effect| tasks.start(effect));
    let mut drawn_at: Option<Instant> = None;
    loop {
        if let Some(at) = drawn_at {
            tokio::time::sleep_until(at + FRAME).await;
        }
        let mut taken = 0;
        while let (true, Ok(message)) = (taken < BATCH, messages.try_recv()) {
            taken += 1;
            if obey(&mut state, &mut tasks, message) {
                return leave(tasks).await;
            }
        }
        // The size may have changed before the resize event arrives.
        let size = crossterm::terminal::size()?;
        if size != state.size {
            obey(&mut state, &mut tasks, Message::Resized(size.0, size.1));
        }
        screen.draw(|frame| {
            view::draw(frame, &state);
            if !has_colour {
                view::without_colour(frame);
            }
        })?;
        drawn_at = Some(Instant::now());
        let message = tokio::select! {
            message = typed.recv() => match message {
                Some(message) => Some(message),
                // The terminal is gone.
                None => return leave(tasks).await,
            },
            message = messages.recv() => message,
            () = ending.asked_for() => return leave(tasks).await,
        };
        let mut next = message;
        let mut taken = 0;
        // Keys that arrive together are drawn together.
        while let Some(message) = next.take() {
            if obey(&mut state, &mut tasks, message) {
                return leave(tasks).await;
            }
            taken += 1;
            if taken < BATCH {
                next = typed.try_recv().ok();
            }
        }
    }
}

/// Applies a message and starts the effects. Returns whether the TUI should quit.
fn obey(state: &mut State, tasks: &mut Tasks, message: Message) -> bool {
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
    let (send, typed) = mpsc::channel(BATCH);
    let reading = tokio::spawn(async move {
        let mut events = EventStream::new();
        while let Some(Ok(event)) = events.next().await {
            if let Some(message) = read(event)
                && send.send(message).await.is_err()
            {
                return;
            }
        }
    });
    (typed, AbortOnDropHandle::new(reading))
}

fn read(event: Event) -> Option<Message> {
    match event {
        Event::Key(key) => Some(Message::Key(key)),
        Event::Mouse(mouse) => Some(Message::Mouse(mouse)),
        Event::Paste(text) => Some(Message::Pasted(text)),
        Event::Resize(cols, rows) => Some(Message::Resized(cols, rows)),
        Event::FocusGained | Event::FocusLost => None,
    }
}

struct Ending([Signal; 3]);

impl Ending {
    fn new() -> std::io::Result<Self> {
        Ok(Self([signal(SignalKind::terminate())?, signal(SignalKind::hangup())?, signal(SignalKind::interrupt())?]))
    }

    async fn asked_for(&mut self) {
        let [terminated, hung_up, interrupted] = &mut self.0;
        tokio::select! {
            _ = terminated.recv() => {}
            _ = hung_up.recv() => {}
            _ = interrupted.recv() => {}
        }
    }
}
