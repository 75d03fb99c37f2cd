//! A LangGraph deployment's stream: whatever it says is read the same however it is cut, and nothing of it controls a terminal.

use cobox_langgraph::{Ask, Decision, Entry, Review, RunEvent, SseParser, Transcript, read_event};

use crate::choose;

/// The first byte says where the stream is cut.
pub fn run(data: &[u8]) {
    let ([cut], stream) = choose::<1>(data);
    let Ok(whole) = SseParser::default().push(stream) else { return };
    let at = usize::from(cut).min(stream.len());
    let mut parser = SseParser::default();
    let mut pieces = parser.push(&stream[..at]).expect("a part of what is not too long");
    pieces.extend(parser.push(&stream[at..]).expect("the rest of it"));
    assert_eq!(whole, pieces);

    let mut transcript = Transcript::default();
    for event in whole.iter().flat_map(read_event) {
        match event {
            RunEvent::Message { message, is_nested } => drop(transcript.take(&message, is_nested)),
            RunEvent::Interrupted(asked) => answer(Review::of(asked)),
            RunEvent::Failed { message } => shown(&message),
            RunEvent::Started { run_id } => shown(&run_id),
            RunEvent::Custom(_) | RunEvent::Reconnected => {}
        }
    }
    for (_, entry) in transcript.entries() {
        match entry {
            Entry::Said { text, .. } | Entry::Note(text) => shown(text),
            Entry::Tool(tool) => {
                shown(&tool.name);
                shown(&tool.args);
                tool.outcome.iter().for_each(|outcome| shown(&outcome.text));
            }
        }
    }
}

/// Every question has an answer, and there is an end to them.
fn answer(review: Option<Review>) {
    let Some(mut review) = review else { return };
    let (_, all) = review.place();
    for _ in 0..all {
        let decision = match review.next() {
            Some(Ask::Action(action)) => {
                shown(&action.name);
                shown(&action.description);
                Decision::Approve
            }
            Some(Ask::Words(text)) => {
                shown(text);
                Decision::Respond("yes".to_owned())
            }
            None => panic!("fewer questions than there are"),
        };
        review.decide(decision).expect("it was offered");
    }
    assert!(review.answer().is_some());
}

fn shown(text: &str) {
    assert!(text.chars().all(|c| !c.is_control() || c == '\n' || c == '\t'), "{text:?}");
}
