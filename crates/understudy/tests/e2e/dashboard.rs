//! The dashboard in a browser, through a real fail-over. `UNDERSTUDY_SCREENSHOTS=DIR` keeps pictures of it.

use crate::api::{ADMIN, PORT, serve};
use crate::browser::Browser;
use crate::refusals::quick;
use crate::stage::{Calm, PACE, await_service, options, play};
use anyhow::{Result, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use understudy_lab::ArbiterKind;
use understudy_lab::scene::VM;

const DESKTOP: (u32, u32) = (1180, 1080);
const PHONE: (u32, u32) = (390, 1500);
/// The words of the drawing about a host that this one has no connection to.
const UNHEARD: &str = "b is not connected to this host";

#[test]
fn a_fail_over_is_seen_on_the_dashboard_and_begun_there() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = options().calm();
    for host in ["a", "b"] {
        let tokens = directory.path().join(host);
        std::fs::create_dir(&tokens).expect("a directory");
        serve(&mut options, host, &tokens).expect("tokens");
    }
    let kept = std::env::var_os("UNDERSTUDY_SCREENSHOTS").map(PathBuf::from);
    let kept = kept.as_deref();
    play(options, |scene| {
        scene.start_guest("a")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        let page = |host| -> Result<String> {
            Ok(format!("https://{}:{PORT}/", scene.lab().host_address(host)?))
        };
        let (on_a, on_b) = (page("a")?, page("b")?);
        let mut browser = Browser::start(&scene.lab().client())?;
        browser.look(DESKTOP, false)?;
        sign_in(&mut browser, &on_a)?;
        browser.picture(kept, "unprotected")?;

        // Left as it is, nothing happens; the keyboard does.
        ask_for(&mut browser, "Protect", "nothing that it sends leaves")?;
        browser.press("Escape", 27)?;
        browser.wait_until("!document.getElementById('dialog').open")?;
        ask_for(&mut browser, "Protect", "nothing that it sends leaves")?;
        browser.picture(kept, "protect-dialog")?;
        browser.click("#dialog-go")?;
        await_badge(&mut browser, "Protected")?;
        ensure!(browser.value(&holds("#drawing", UNHEARD))? == false, "b is connected");
        browser.wait_until(&holds("#events", "protected: b stands by"))?;
        await_service(&client)?;
        browser.wait_until(&holds(".figures", "99 % within"))?;
        browser.picture(kept, "protected")?;
        browser.look(DESKTOP, true)?;
        browser.picture(kept, "protected-dark")?;
        on_phone(&mut browser, kept, "protected")?;

        ask_for(&mut browser, "Fail over", "Nothing is lost")?;
        browser.picture(kept, "fail-over-dialog")?;
        browser.click("#dialog-go")?;
        browser.wait_until(&holds("#events", "handed over to b"))?;
        browser.picture_now(kept, "handed-over")?;
        on_phone(&mut browser, kept, "handed-over")?;
        sign_in(&mut browser, &on_b)?;
        await_badge(&mut browser, "Not protected")?;
        ask_for(&mut browser, "Protect", "nothing that it sends leaves")?;
        browser.click("#dialog-go")?;
        await_badge(&mut browser, "Protected")?;

        // The tab still has its token.
        browser.open(&on_a)?;
        await_badge(&mut browser, "Stands by")?;
        browser.picture(kept, "stands-by")?;
        on_phone(&mut browser, kept, "stands-by")?;
        check_for_readers(&mut browser)?;
        scene.host_mut("b")?.kill_everything()?;
        browser.wait_until(&holds("#events", "took over:"))?;
        browser.picture_now(kept, "takes-over")?;
        on_phone(&mut browser, kept, "takes-over")?;
        await_badge(&mut browser, "Not protected")?;
        browser.wait_until(&holds(".takeover", "clients waited"))?;
        // No dead host looks like a living one.
        browser.wait_until(&holds("#drawing", UNHEARD))?;
        await_service(&client)?;
        browser.picture(kept, "after-fail-over")?;
        on_phone(&mut browser, kept, "after-fail-over")?;
        let complaints = browser.complaints();
        ensure!(complaints.is_empty(), "the page complains: {complaints:?}");
        Ok(())
    });
}

/// It said that the VM was being copied, whatever became of that.
#[test]
fn a_protection_that_is_refused_is_told_in_its_dialog() {
    let directory = tempfile::tempdir().expect("a directory");
    let mut options = quick();
    serve(&mut options, "a", directory.path()).expect("tokens");
    options.daemons.get_mut("a").expect("host a").arbiter = ArbiterKind::None;
    play(options, |scene| {
        scene.start_guest("a")?;
        let mut browser = Browser::start(&scene.lab().client())?;
        browser.look(DESKTOP, false)?;
        sign_in(&mut browser, &format!("https://{}:{PORT}/", scene.lab().host_address("a")?))?;
        ask_for(&mut browser, "Protect", "so this will be refused")?;
        browser.click("#dialog-go")?;
        browser.wait_until(&holds("#dialog-error", "has no [arbiter]"))?;
        ensure!(browser.value("document.getElementById('dialog').open")? == true, "it is closed");
        ensure!(browser.value(&holds("#outcome", "is being copied"))? == false, "it is copied");
        Ok(())
    });
}

/// Shows no data to whoever has no token; then all of it.
fn sign_in(browser: &mut Browser, address: &str) -> Result<()> {
    browser.open(address)?;
    browser.wait_until("document.activeElement?.id === 'token'")?;
    ensure!(!text(browser)?.contains(VM), "data is shown to strangers");
    browser.type_text("guessed-0123456789abcdef")?;
    browser.press("Enter", 13)?;
    browser.wait_until(&holds("#login-error", "in no file"))?;
    browser.value("document.getElementById('token').focus()")?;
    browser.type_text(ADMIN)?;
    browser.press("Enter", 13)?;
    browser.wait_until(&holds(".vm h3", VM))
}

/// Opens the dialog of an action; the focus is in it, and never on what does it.
fn ask_for(browser: &mut Browser, action: &str, words: &str) -> Result<()> {
    browser.click(&format!("button[aria-label='{action} {VM}']"))?;
    browser.wait_until("document.getElementById('dialog').open")?;
    let focus = browser.value(
        "[document.getElementById('dialog').contains(document.activeElement), \
         document.activeElement.id]",
    )?;
    ensure!(focus[0] == true && focus[1] != "dialog-go", "the focus is on {focus}");
    browser.wait_until(&holds("#dialog-words", words))
}

/// The same page on a phone, which has nothing to be found sideways.
fn on_phone(browser: &mut Browser, kept: Option<&Path>, name: &str) -> Result<()> {
    browser.look(PHONE, false)?;
    browser.wait_until("document.querySelector('#drawing svg.narrow') !== null")?;
    browser.wait_until("document.documentElement.scrollWidth <= innerWidth")?;
    browser.picture_now(kept, &format!("{name}-phone"))?;
    browser.look(DESKTOP, false)
}

fn await_badge(browser: &mut Browser, words: &str) -> Result<()> {
    let badge = "document.querySelector('.vm .badge')?.textContent";
    browser.wait_until(&format!("{badge} === {}", Value::from(words)))
}

fn holds(selector: &str, words: &str) -> String {
    let (selector, words) = (Value::from(selector), Value::from(words));
    format!("document.querySelector({selector})?.textContent.includes({words}) === true")
}

fn text(browser: &mut Browser) -> Result<String> {
    Ok(browser.value("document.body.innerText")?.as_str().unwrap_or_default().to_owned())
}

/// Checks what a screen reader needs: landmarks, one first heading, names for all that can be used.
fn check_for_readers(browser: &mut Browser) -> Result<()> {
    let nameless = browser.value(
        "[...document.querySelectorAll('button, input, select, progress, svg[role=img], section')]\
         .filter((one) => one.checkVisibility() && !(one.textContent.trim() || one.labels?.length \
         || one.ariaLabel || one.getAttribute('aria-labelledby'))).map((one) => one.outerHTML)",
    )?;
    ensure!(nameless.as_array().is_some_and(Vec::is_empty), "no name: {nameless}");
    let counts = browser.value(
        "['main', 'body > header', 'h1', 'html[lang]', '[aria-live]', 'a.skip'].map((one) => \
         [one, document.querySelectorAll(one).length])",
    )?;
    let missing = counts.as_array().into_iter().flatten().find(|count| count[1] == 0);
    ensure!(missing.is_none(), "there is no {missing:?}");
    Ok(())
}
