//! A headless Chromium in the laboratory's client, told what to do over a pair of pipes (the DevTools protocol).

use crate::stage::LIMIT;
use anyhow::{Context, Result, bail, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};
use tempfile::TempDir;
use understudy_lab::{Namespace, patience, wait_for};

/// Time before a picture.
const SETTLED: Duration = Duration::from_secs(9);
/// The shell reads commands from descriptor 3 and answers on descriptor 4.
const AS_PIPES: &str = "exec \"$0\" \"$@\" 3<&0 4>&1 >/dev/null 2>&1";

/// One browser with one tab.
pub struct Browser {
    process: Child,
    commands: ChildStdin,
    answers: Receiver<Value>,
    /// Messages of the page that nobody has asked for.
    told: VecDeque<Value>,
    session: Option<String>,
    next: u64,
    _profile: TempDir,
}

impl Browser {
    /// Starts one that takes the laboratory's certificates as they are.
    pub fn start(client: &Namespace) -> Result<Browser> {
        let profile = tempfile::tempdir()?;
        let mut command = client.command("bash");
        command.args(["-c", AS_PIPES]).arg(program()?).args([
            "--headless",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
            "--ignore-certificate-errors",
        ]);
        command.arg(format!("--user-data-dir={}", profile.path().display()));
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null()).process_group(0);
        let mut process = command.spawn().context("cannot start a browser")?;
        let (Some(commands), Some(answers)) = (process.stdin.take(), process.stdout.take()) else {
            bail!("the browser has no pipes");
        };
        let (sender, receiver) = channel();
        std::thread::spawn(move || {
            let messages = BufReader::new(answers).split(0).map_while(Result::ok);
            let parsed = messages.filter_map(|bytes| serde_json::from_slice(&bytes).ok());
            // Ends with the browser, or with whoever listens.
            let _ = parsed.map(|message: Value| sender.send(message)).find(Result::is_err);
        });
        let mut browser = Browser {
            process,
            commands,
            answers: receiver,
            told: VecDeque::new(),
            session: None,
            next: 0,
            _profile: profile,
        };
        let tab = browser.call("Target.createTarget", json!({ "url": "about:blank" }))?;
        let attach = json!({ "targetId": tab["targetId"], "flatten": true });
        let session = browser.call("Target.attachToTarget", attach)?;
        browser.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page.enable", "Runtime.enable", "Log.enable"] {
            browser.call(domain, json!({}))?;
        }
        Ok(browser)
    }

    fn call(&mut self, method: &str, parameters: Value) -> Result<Value> {
        self.next += 1;
        let mut message = json!({ "id": self.next, "method": method, "params": parameters });
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.commands.write_all(message.to_string().as_bytes())?;
        self.commands.write_all(&[0])?;
        self.commands.flush()?;
        let deadline = Instant::now() + LIMIT * patience();
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let answer = self.answers.recv_timeout(left);
            let answer = answer.with_context(|| format!("the browser does not answer {method}"))?;
            if answer["id"] != self.next {
                self.told.push_back(answer);
                continue;
            }
            ensure!(answer["error"].is_null(), "{method}: {}", answer["error"]);
            return Ok(answer["result"].clone());
        }
    }

    /// Opens an address.
    pub fn open(&mut self, address: &str) -> Result<()> {
        let opened = self.call("Page.navigate", json!({ "url": address }))?;
        ensure!(opened["errorText"].is_null(), "{address}: {}", opened["errorText"]);
        Ok(())
    }

    /// The value of an expression in the page.
    pub fn value(&mut self, expression: &str) -> Result<Value> {
        let asked =
            json!({ "expression": expression, "returnByValue": true, "awaitPromise": true });
        let answer = self.call("Runtime.evaluate", asked)?;
        let problem = &answer["exceptionDetails"];
        ensure!(problem.is_null(), "{expression}: {problem}");
        Ok(answer["result"]["value"].clone())
    }

    /// Waits until an expression is true; shows the page's text if it never is.
    pub fn wait_until(&mut self, expression: &str) -> Result<()> {
        let waited = wait_for(expression, LIMIT, || {
            // Nothing is there while the page loads.
            let value = self.value(expression).unwrap_or_default();
            Ok((value == true).then_some(()))
        });
        waited.with_context(|| {
            let text = self.value("document.body.innerText").unwrap_or_default();
            format!("the page says: {text}")
        })
    }

    /// Clicks what a selector finds, as a person would.
    pub fn click(&mut self, selector: &str) -> Result<()> {
        let found = format!("document.querySelector({})", Value::from(selector));
        self.wait_until(&format!("{found} !== null && !{found}.disabled"))?;
        self.value(&format!("{found}.click()")).map(drop)
    }

    /// Types text where the focus is.
    pub fn type_text(&mut self, text: &str) -> Result<()> {
        self.call("Input.insertText", json!({ "text": text })).map(drop)
    }

    /// Presses a key.
    pub fn press(&mut self, key: &str, code: u32) -> Result<()> {
        for kind in ["keyDown", "keyUp"] {
            let text = if key == "Enter" && kind == "keyDown" { "\r" } else { "" };
            let event = json!({
                "type": kind, "key": key, "code": key, "windowsVirtualKeyCode": code, "text": text,
            });
            self.call("Input.dispatchKeyEvent", event)?;
        }
        Ok(())
    }

    /// Gives the page another size and scheme of colours.
    pub fn look(&mut self, (width, height): (u32, u32), dark: bool) -> Result<()> {
        let size = json!({
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500,
        });
        self.call("Emulation.setDeviceMetricsOverride", size)?;
        let scheme = if dark { "dark" } else { "light" };
        let features = json!([{ "name": "prefers-color-scheme", "value": scheme }]);
        self.call("Emulation.setEmulatedMedia", json!({ "features": features })).map(drop)
    }

    /// Writes what is to be seen as a PNG, if there is a directory for it: of a steady guest, and with no
    /// word of what was done last.
    pub fn picture(&mut self, directory: Option<&Path>, name: &str) -> Result<()> {
        if directory.is_some() {
            std::thread::sleep(SETTLED);
        }
        self.picture_now(directory, name)
    }

    /// The same of this very moment.
    pub fn picture_now(&mut self, directory: Option<&Path>, name: &str) -> Result<()> {
        let Some(directory) = directory else { return Ok(()) };
        let picture = self.call("Page.captureScreenshot", json!({ "format": "png" }))?;
        let data = BASE64_STANDARD.decode(picture["data"].as_str().context("no picture")?)?;
        Ok(std::fs::write(directory.join(format!("{name}.png")), data)?)
    }

    /// Errors that the page had: exceptions, and what it was kept from by its policy.
    pub fn complaints(&mut self) -> Vec<String> {
        self.told.extend(self.answers.try_iter());
        let grave = |event: &Value| match event["method"].as_str() {
            Some("Runtime.exceptionThrown") => true,
            Some("Log.entryAdded") => {
                let entry = &event["params"]["entry"];
                // That a host does not answer, or asks for a token, is part of the story.
                entry["level"] == "error" && entry["source"] != "network"
            }
            _ => false,
        };
        self.told.drain(..).filter(grave).map(|event| event["params"].to_string()).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        self.session = None;
        let _ = self.call("Browser.close", json!({}));
        let group = Pid::from_raw(self.process.id() as i32);
        let _ = killpg(group, Signal::SIGKILL);
        let _ = self.process.wait();
        // Its helpers write to the profile for as long as they live.
        let _ = wait_for("the browser's helpers to end", LIMIT, || {
            Ok(killpg(group, None).is_err().then_some(()))
        });
    }
}

fn program() -> Result<&'static str> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let is_there =
        |name: &&&str| std::env::split_paths(&path).any(|folder| folder.join(name).is_file());
    let known = &["chromium-headless-shell", "chromium"];
    known.iter().find(is_there).copied().context("there is no Chromium: run `scripts/setup tests`")
}
