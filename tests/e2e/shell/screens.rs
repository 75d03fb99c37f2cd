//! The same program with and without a sandbox shows the same screen, with identical cells and colours.

use cobox_client::Upload;
use cobox_testkit::{TestTerminal, ensure, eventually, sh};

use super::*;

const FULL_SCREEN_PROGRAM: &str = include_str!("full_screen_program.py");
const VIM: &str = "vim -u NONE -i NONE -n -N text.txt";

/// A program run locally and in the sandbox, with the same input.
struct Pair {
    here: TestTerminal,
    there: TestTerminal,
    _dir: tempfile::TempDir,
}

impl Pair {
    /// Starts the program locally and in the sandbox, with the same files.
    async fn start(broker: &TestBroker, program: &str, files: &[(&str, &str)]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let session = ensure(&broker.client(), "demo").await;
        for (name, text) in files {
            std::fs::write(dir.path().join(name), text).unwrap();
            let path = format!("/workspace/{name}");
            session.dataplane().write_file(path.as_bytes(), None, Upload::from_bytes((*text).to_owned())).await.unwrap();
        }
        let here = run_locally("here", dir.path(), program);
        let there = attach(broker, "there", &["-c", program]).await;
        Self { here, there, _dir: dir }
    }

    /// Waits until both show the text and their screens are identical.
    async fn both_show(&self, text: &str) {
        self.here.wait_for(text).await;
        self.there.wait_for(text).await;
        self.there.wait_for_same_screen(&self.here).await;
    }

    async fn press(&mut self, keys: &str, text: &str) {
        self.here.press(keys);
        self.there.press(keys);
        self.both_show(text).await;
    }

    async fn resize(&mut self, cols: u16, rows: u16, text: &str) {
        self.here.resize(cols, rows);
        self.there.resize(cols, rows);
        self.both_show(text).await;
    }

    async fn end(mut self, keys: &str) {
        self.here.press(keys);
        self.there.press(keys);
        let (here, there) = (self.here.ended().await, self.there.ended().await);
        assert_eq!((there.code(), here.code()), (Some(0), Some(0)));
        self.there.wait_for_same_screen(&self.here).await;
        assert!(!self.there.screen_state().is_alternate && self.there.is_cooked());
    }
}

fn numbered_lines(lines: usize) -> String {
    (1..=lines).map(|n| format!("line {n}\twith a tab, ünïcödé, 漢字 and {}\n", "x".repeat(n % 70))).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn vim_looks_the_same_with_and_without_a_sandbox() {
    let broker = broker_with_sandbox().await;
    let mut vim = Pair::start(&broker, VIM, &[("text.txt", numbered_lines(200).as_str())]).await;
    vim.both_show("line 1").await;
    vim.press("ihéllo wörld 漢字 🙂", "héllo wörld 漢字").await;
    vim.press("\x1b", "héllo").await;
    vim.press(":set hlsearch\r/line 3\r", "line 3").await;
    vim.press(":split\r", "text.txt [+]").await;
    vim.press("\x17j\x06", "line 19").await;
    // 24-bit colours and 256 colours.
    vim.press(":set termguicolors | hi Normal guifg=#12ab34 guibg=#101020 | hi StatusLine guifg=#ff8800\r", "line 19").await;
    vim.press(":set notermguicolors | hi Normal ctermfg=201 ctermbg=17\r", "line 19").await;
    // A click moves the cursor, and vim shows the position.
    vim.press(":set mouse=a ttymouse=sgr ruler\r", "line 19").await;
    eventually("a mouse", || async {
        [&vim.here, &vim.there].iter().all(|t| t.look(|s| s.mouse_protocol_mode()) != vt100::MouseProtocolMode::None).then_some(())
    })
    .await;
    vim.press("\x1b[<0;6;3M\x1b[<0;6;3m", "4,6 ").await;
    vim.press("iclicked \x1b", "clicked").await;
    vim.resize(100, 30, "clicked").await;
    vim.resize(57, 19, "clicked").await;
    vim.resize(80, 24, "clicked").await;
    vim.end(":qa!\r").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_screen_program_looks_the_same_even_while_resized() {
    let broker = broker_with_sandbox().await;
    let mut pair = Pair::start(&broker, "python3 full_screen_program.py", &[("full_screen_program.py", FULL_SCREEN_PROGRAM)]).await;
    pair.both_show("step 0").await;
    for step in 1..=12 {
        pair.press("n", &format!("step {step} ")).await;
    }
    for (step, (cols, rows)) in [(120, 40), (40, 12), (33, 20), (200, 60), (80, 24)].into_iter().enumerate() {
        pair.resize(cols, rows, &format!(" {cols}x{rows} ")).await;
        pair.press("nn", &format!("step {} ", 14 + 2 * step)).await;
    }
    pair.end("q").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_kind_of_sequence_reaches_the_controller_unchanged() {
    const SEQUENCES: &str = r#"printf '\033[1;3;4;7mall\033[0m \033[38;5;201m256\033[48;2;1;2;3;38;2;250;128;0mtrue\033[m\n'
printf '\033(0lqqk\033(B \342\224\214\342\224\200\342\224\220 e\314\201 \346\274\242 \360\237\231\202 \360\237\221\250\342\200\215\360\237\221\251\n'
printf 'tabs\ta\tb\033[5G\033[2Pdel\033[3@ins\n\033[5;8rregion\033[8;1H\n\n\033[r\033[10;10H\0337saved\0338\033[1Cback'
printf '\033[12;1H\033[?7lno wrap %080d\033[?7h\033[13;1H\033[4hins\033[4l'
printf '\033[15;1H\033[?1049h\033[?25l\033[?1h\033=\033[?1002h\033[?1006h\033[?2004h\033[3;3Hother screen'
stty raw -echo; head -c 1 >/dev/null
printf '\033[?1049l\033[?25h\033[6n'; answer=$(head -c 7 | tail -c 6); stty sane; printf '\033[17;1Hasked: %s\n' "$answer"; head -n 1"#;
    let broker = broker_with_sandbox().await;
    let mut pair = Pair::start(&broker, SEQUENCES, &[]).await;
    pair.both_show("other screen").await;
    let there = pair.there.screen_state();
    assert!(there.is_alternate && there.hides_cursor && there.text.contains("other screen"));
    assert!(pair.there.look(|s| s.bracketed_paste() && s.application_cursor() && s.application_keypad()));
    // Back on the normal screen; the terminal of the participant in control answers a query.
    pair.press("x", "asked: [15;1R").await;
    // Modes that are still on are switched off when the program ends.
    let modes = |t: &TestTerminal| t.look(|s| (s.bracketed_paste(), s.application_cursor(), s.mouse_protocol_mode()));
    assert_ne!(modes(&pair.there).2, vt100::MouseProtocolMode::None);
    pair.there.press("\r");
    assert_eq!(pair.there.ended().await.code(), Some(0));
    assert_eq!(modes(&pair.there), (false, false, vt100::MouseProtocolMode::None));
}

/// 100 kB of text with everything that could cause problems in a paste.
fn paste_text() -> String {
    let mut text = String::new();
    let mut n = 0;
    while text.len() < 100_000 {
        n += 1;
        text.push_str(&format!("{n}: héllo 漢字 🙂 \\x \"quoted\" $HOME `cmd` {}\n~.\n~t\n", "abc~".repeat(n % 13)));
    }
    text
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paste_of_100_kb_arrives_unchanged_and_triggers_no_escape_command() {
    let broker = broker_with_sandbox().await;
    let session = ensure(&broker.client(), "demo").await;
    let pasted = paste_text().replace('\n', "\r");
    let bytes = pasted.len() + 12;
    let program =
        format!("stty raw -echo; printf '\\033[?2004hready'; head -c {bytes} > got; printf '\\033[?2004l'; stty sane; echo all of it");
    let mut ada = attach(&broker, "ada", &["-c", &program]).await;
    ada.wait_for("ready").await;
    ada.paste(&pasted);
    ada.wait_for("all of it").await;
    assert_eq!(ada.ended().await.code(), Some(0));
    let got = sh(session.dataplane(), "base64 -w0 got").await.stdout;
    let got = base64::Engine::decode(&base64::engine::general_purpose::STANDARD, got.trim()).unwrap();
    assert!(got == format!("\x1b[200~{pasted}\x1b[201~").into_bytes(), "{} bytes of {bytes}", got.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_paste_of_100_kb_into_vim_is_written_unchanged() {
    let broker = broker_with_sandbox().await;
    let session = ensure(&broker.client(), "demo").await;
    let pasted = paste_text();
    let mut vim = Pair::start(&broker, VIM, &[]).await;
    vim.both_show("[New]").await;
    vim.press("i", "-- INSERT --").await;
    for terminal in [&mut vim.here, &mut vim.there] {
        assert!(terminal.look(vt100::Screen::bracketed_paste));
        terminal.paste(&pasted.replace('\n', "\r"));
    }
    let last = pasted.lines().rev().find(|line| line.len() > 2).unwrap().split(' ').next().unwrap().to_owned();
    for terminal in [&vim.here, &vim.there] {
        terminal.wait_for(&last).await;
    }
    // Redrawn, because the way vim clears a row depends on how the paste is split into chunks.
    vim.press("\x1b\x0c:w\r", "written").await;
    vim.end(":q\r").await;
    let written = sh(session.dataplane(), "cat text.txt").await.stdout;
    assert!(written == pasted + "\n", "{} bytes", written.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ctrl_c_ends_the_running_program_and_the_shell_continues() {
    let broker = broker_with_sandbox().await;
    let mut ada = attach(&broker, "ada", &[]).await;
    ada.wait_for("$ ").await;
    // Printed by the program itself: before it runs in the foreground, Ctrl-C would go to the shell.
    ada.press("sh -c 'echo started; exec sleep 1000'\r");
    ada.wait_for("\nstarted").await;
    ada.press("\x03");
    ada.press("echo code $?\r");
    ada.wait_for("code 130").await;
    // Ctrl-Z, Ctrl-D and others reach the shell as well. Input that arrives before the shell has left its line editor
    // would be read by the editor, which translates Enter to another character.
    ada.press("echo reading; cat\r");
    ada.wait_for("\nreading").await;
    ada.press("one line\r");
    ada.wait_for("one line\none line").await;
    ada.press("\x1a");
    ada.wait_for("Stopped").await;
    ada.press("exit 9\r");
    ada.wait_for("stopped jobs").await;
    ada.press("exit 9\r");
    assert_eq!(ada.ended().await.code(), Some(9));
    assert!(ada.is_cooked());
}

/// Users who work in this terminal all day must be able to trust its status messages.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_messages_disappear_without_a_trace() {
    let broker = broker_with_sandbox().await;
    let mut vim = Pair::start(&broker, VIM, &[("text.txt", numbered_lines(50).as_str())]).await;
    vim.both_show("line 1").await;
    vim.there.press("\r~s");
    vim.there.wait_for("demo · you have control · connected · 80×24").await;
    vim.here.press("\r");
    // At the other end of the screen from the cursor.
    vim.there.press("G");
    vim.here.press("G");
    vim.there.wait_for("line 50").await;
    vim.there.wait_for("you have control").await;
    vim.there.press("\r~?");
    vim.there.wait_for("s status").await;
    vim.there.press("~s~l");
    vim.here.press("\r");
    vim.both_show("line 50").await;
    vim.end(":q\r").await;
}
