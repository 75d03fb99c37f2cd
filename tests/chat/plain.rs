//! `cobox chat --no-tui`: input and output as lines, as scripts and screen readers use it.

use std::{
    io::Write,
    process::{Command, Output, Stdio},
};

use cobox_testkit::TestBroker;
use serde_json::Value;

use crate::deployment::{ANN, Example};

fn chat(broker: &TestBroker, example: &Example, flags: &[&str]) -> Command {
    let mut command = broker.cobox();
    command.env("COBOX_DEPLOYMENT_URL", &example.url).env("COBOX_DEPLOYMENT_KEY", ANN).args(flags);
    command
}

async fn run_chat(mut command: Command, input: &'static str) -> Output {
    tokio::task::spawn_blocking(move || {
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("cobox runs");
        child.stdin.take().expect("its input").write_all(input.as_bytes()).expect("it reads");
        child.wait_with_output().expect("it ends")
    })
    .await
    .expect("no panic")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "needs a LangGraph server: scripts/check-langgraph"]
async fn a_script_talks_to_an_agent_and_answers_its_questions() {
    let broker = TestBroker::start().await;
    let example = Example::start(&broker).await;

    // The agent's text is on stdout, everything else on stderr.
    let output = run_chat(
        chat(&broker, &example, &["chat", "--no-tui", "--sandbox"]),
        "write /workspace/a.txt hello-$((1+1))\nread /workspace/a.txt\n/sandbox list\n",
    )
    .await;
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(0), "{stdout}{stderr}");
    assert!(stdout.contains("hello-$((1+1))") && !stdout.contains("write_file"), "{stdout}");
    for line in [
        "agent at http://",
        "sandbox sb_",
        "tool: write_file /workspace/a.txt",
        "wrote /workspace/a.txt",
        "tool: read_file /workspace/a.txt",
        "* -  active  sb_",
    ] {
        assert!(stderr.contains(line), "{line} in\n{stderr}");
    }

    // With --json, everything is one object per line; the next input line answers a question.
    let flags = &["--json", "chat", "--sandbox=shared"];
    let output =
        run_chat(chat(&broker, &example, flags), "write /workspace/b.txt x\ndelete /workspace/b.txt\nno keep it\nrun ls /workspace\n")
            .await;
    let lines: Vec<Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let of = |kind: &str| lines.iter().filter(|l| l["type"] == kind).collect::<Vec<_>>();
    assert_eq!(of("interrupt").len(), 1, "{lines:?}");
    assert_eq!((&of("interrupt")[0]["name"], &of("interrupt")[0]["args"]["file_path"]), (&"delete".into(), &"/workspace/b.txt".into()));
    assert!(of("text").last().unwrap()["text"].as_str().unwrap().contains("b.txt"), "it is still there: {lines:?}");
    assert_eq!(of("tool_result").len(), 3);

    // The sandbox has the requested name, and user and agent share it.
    let sandbox = broker.client().get_sandbox("shared").await.unwrap();
    assert_eq!(of("sandbox")[0]["sandbox_id"], sandbox.id.to_string());
    let thread = of("thread")[0]["thread_id"].as_str().unwrap();
    assert!(sandbox.threads.iter().any(|t| t == thread));

    // A user with a login at the deployment needs no broker of their own.
    let mut command = chat(&broker, &example, &["chat", "--no-tui", "--sandbox"]);
    command.env_remove("COBOX_URL").env_remove("COBOX_API_KEY").env("XDG_CONFIG_HOME", "/nonexistent");
    let output = run_chat(command, "run echo through-$((40+2))\n").await;
    let (stdout, stderr) = (text(&output.stdout), text(&output.stderr));
    assert!(stdout.contains("through-42") && stderr.contains("sandbox sb_"), "{stdout}{stderr}");

    // An unanswered question is a failure whose message explains how to continue.
    let output = run_chat(chat(&broker, &example, &["chat", "--no-tui"]), "delete /workspace/none\n").await;
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("cobox chat --thread"), "{}", text(&output.stderr));
}
