//! The stream of a LangGraph deployment: it parses the same for any chunks, and no part of it controls a terminal.

use cobox_langgraph::{Decision, Entry, Question, Review, RunEvent, SseParser, Transcript, read_event};

use crate::choose;

/// The first byte is the offset at which the stream is split.
pub fn run(data: &[u8]) {
    let ([cut], stream) = choose::<1>(data);
    let Ok(whole) = SseParser::default().push(stream) else { return };
    let at = usize::from(cut).min(stream.len());
    let mut parser = SseParser::default();
    let mut pieces = parser.push(&stream[..at]).expect("a prefix of a valid stream is valid");
    pieces.extend(parser.push(&stream[at..]).expect("the rest of a valid stream is valid"));
    assert_eq!(whole, pieces);

    let mut transcript = Transcript::default();
    for event in whole.iter().flat_map(read_event) {
        match event {
            RunEvent::Message { message, is_nested } => drop(transcript.apply(&message, is_nested)),
            RunEvent::Interrupted(asked) => answer(Review::of(asked)),
            RunEvent::Failed { message } => assert_harmless(&message),
            RunEvent::Started { run_id } => assert_harmless(&run_id),
            RunEvent::Custom(_) | RunEvent::Reconnected => {}
        }
    }
    for (_, entry) in transcript.entries() {
        match entry {
            Entry::Message { text, .. } | Entry::Note(text) => assert_harmless(text),
            Entry::Tool(tool) => {
                assert_harmless(&tool.name);
                assert_harmless(&tool.args);
                tool.outcome.iter().for_each(|outcome| assert_harmless(&outcome.text));
            }
        }
    }
}

/// Every question can be answered, and the questions end.
fn answer(review: Option<Review>) {
    let Some(mut review) = review else { return };
    let (_, all) = review.progress();
    for _ in 0..all {
        let decision = match review.next() {
            Some(Question::Action(action)) => {
                assert_harmless(&action.name);
                assert_harmless(&action.description);
                Decision::Approve
            }
            Some(Question::Text(text)) => {
                assert_harmless(text);
                Decision::Respond("yes".to_owned())
            }
            None => panic!("there are fewer questions than reported"),
        };
        review.decide(decision).expect("the decision was offered");
    }
    assert!(review.answer().is_some());
}

fn assert_harmless(text: &str) {
    assert!(text.chars().all(|c| !c.is_control() || c == '\n' || c == '\t'), "{text:?}");
}
