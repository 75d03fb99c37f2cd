//! The LangGraph client with a real server: assistants, threads, runs, interrupts, cancellation, and an unreliable
//! network.

use std::time::Duration;

use cobox_langgraph::{Decision, Deployment, Entry, Question, Review, RunEvent, RunInput, RunRequest, Transcript};
use cobox_testkit::{CutPolicy, CuttingProxy, TestBroker};

use crate::deployment::{Example, deployment};

fn say(text: &str) -> RunRequest {
    // The server replaces a message that has the same id.
    let id = format!("said-{}", cobox_protocol::ShellId::new());
    RunRequest { assistant: "agent".into(), input: RunInput::Message { id, text: text.into() }, sandbox: None }
}

/// Follows a run to its end. Returns its events and applies its messages to the transcript.
async fn follow(deployment: &Deployment, thread: &str, request: &RunRequest, transcript: &mut Transcript) -> Vec<RunEvent> {
    let mut run = deployment.run(thread, request).await.expect("a run");
    let mut told = Vec::new();
    while let Some(event) = run.next().await.expect("its stream") {
        if let RunEvent::Message { message, is_nested } = &event {
            transcript.apply(message, *is_nested);
        }
        told.push(event);
    }
    told
}

fn tools(transcript: &Transcript) -> Vec<(String, bool)> {
    let tool = |entry: &Entry| if let Entry::Tool(tool) = entry { Some((tool.name.clone(), tool.outcome.is_some())) } else { None };
    transcript.entries().filter_map(|(_, entry)| tool(entry)).collect()
}

fn last_words(transcript: &Transcript) -> String {
    let text = |entry: &Entry| if let Entry::Message { text, .. } = entry { Some(text.clone()) } else { None };
    transcript.entries().rev().find_map(|(_, entry)| text(entry)).unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a LangGraph server: scripts/check-langgraph"]
async fn a_conversation_is_had_kept_and_found_again() {
    let broker = TestBroker::start().await;
    let example = Example::start(&broker).await;
    let ann = example.as_ann();
    let assistants = ann.assistants().await.unwrap();
    assert!(assistants.iter().any(|a| a.is_named("agent")), "{assistants:?}");
    let thread = ann.create_thread().await.unwrap().id;

    // Text that arrives in pieces and then as a whole results in one entry per call and per answer.
    let mut transcript = Transcript::default();
    let request = say("write /workspace/hello.txt hi");
    let RunInput::Message { id, text } = &request.input else { unreachable!() };
    transcript.add_user_message(id, text);
    let told = follow(&ann, &thread, &request, &mut transcript).await;
    assert!(matches!(told[0], RunEvent::Started { .. }), "{told:?}");
    assert_eq!(tools(&transcript), [("write_file".to_owned(), true)]);
    assert_eq!(transcript.entries().filter(|(_, e)| matches!(e, Entry::Message { .. })).count(), 2, "a question and an answer");
    let is_sandbox = |e: &&RunEvent| matches!(e, RunEvent::Custom(v) if v["type"] == "sandbox" && v["event"]["type"] == "file_written");
    assert!(told.iter().any(|e| is_sandbox(&e)), "{told:?}");

    follow(&ann, &thread, &say("read /workspace/hello.txt"), &mut transcript).await;
    assert!(last_words(&transcript).contains("hi"));
    let state = ann.state(&thread).await.unwrap();
    assert_eq!(state.messages.len(), 8, "{:?}", state.messages);
    assert!(ann.history(&thread, 50).await.unwrap().len() > 4);
    ann.name_thread(&thread, "hello").await.unwrap();
    let found = ann.threads(10).await.unwrap();
    assert_eq!((found[0].id.as_str(), found[0].title.as_deref()), (thread.as_str(), Some("hello")));

    // Before it deletes a file the agent asks, and the answer takes effect.
    for (decision, is_left) in [(Decision::Reject("keep it".into()), true), (Decision::Approve, false)] {
        let told = follow(&ann, &thread, &say("delete /workspace/hello.txt"), &mut transcript).await;
        let asked =
            told.iter().find_map(|e| if let RunEvent::Interrupted(asked) = e { Some(asked.clone()) } else { None }).expect("a question");
        assert_eq!(ann.state(&thread).await.unwrap().interrupts.len(), 1, "a participant who joins later is asked, too");
        let mut review = Review::of(asked).unwrap();
        assert!(matches!(review.next(), Some(Question::Action(action)) if action.name == "delete"));
        review.decide(decision).unwrap();
        let answer = RunRequest { assistant: "agent".into(), input: RunInput::Resume(review.answer().unwrap()), sandbox: None };
        follow(&ann, &thread, &answer, &mut transcript).await;
        let listed = say("run ls /workspace");
        follow(&ann, &thread, &listed, &mut transcript).await;
        assert_eq!(last_words(&transcript).contains("hello.txt"), is_left, "{}", last_words(&transcript));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a LangGraph server: scripts/check-langgraph"]
async fn a_run_outlives_a_lost_connection_and_ends_when_told() {
    let broker = TestBroker::start().await;
    let example = Example::start(&broker).await;
    let never = CutPolicy { count: 0, within_bytes: u64::MAX, within: Duration::from_secs(3600) };
    let network = CuttingProxy::in_front_of(&example.url, never, 1).await;
    let ann = deployment(&network.url());
    let thread = ann.create_thread().await.unwrap().id;

    let mut run = ann.run(&thread, &say("run sleep 1; echo it-went-on-$((6*7))")).await.unwrap();
    let mut transcript = Transcript::default();
    let mut has_reconnected = false;
    while let Some(event) = run.next().await.expect("its stream") {
        match event {
            RunEvent::Message { message, is_nested } => {
                transcript.apply(&message, is_nested);
                if !has_reconnected {
                    network.set_down(true);
                    network.set_down(false);
                }
            }
            RunEvent::Reconnected => has_reconnected = true,
            _ => {}
        }
    }
    assert!(has_reconnected, "the connection was cut");
    assert_eq!(tools(&transcript), [("execute".to_owned(), true)]);
    assert!(last_words(&transcript).contains("it-went-on-42"), "{}", last_words(&transcript));

    let mut run = ann.run(&thread, &say("run sleep 600")).await.unwrap();
    while let Some(event) = run.next().await.expect("its stream") {
        if let RunEvent::Started { run_id } = event {
            ann.cancel(&thread, &run_id).await.unwrap();
        }
    }
    assert_ne!(ann.threads(1).await.unwrap()[0].status, "busy");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a LangGraph server: scripts/check-langgraph"]
async fn a_stranger_is_told_what_to_check() {
    let broker = TestBroker::start().await;
    let example = Example::start(&broker).await;
    let stranger = Deployment::new(&example.url, None, None).unwrap();
    let refused = stranger.assistants().await.unwrap_err();
    assert_eq!(refused.status(), Some(401));
    assert!(refused.advice().unwrap().contains("COBOX_DEPLOYMENT_KEY"));
    let ann = example.as_ann();
    assert_eq!(ann.state("00000000-0000-0000-0000-000000000000").await.unwrap_err().status(), Some(404));
    assert!(ann.run("../assistants", &say("x")).await.is_err());
}
