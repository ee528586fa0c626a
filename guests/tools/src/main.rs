//! The guest's side of the demo and of the end-to-end tests.
//!
//! One statically linked program, started in the guest as
//! `/bin/guest-tools COMMAND …`:
//!
//! | command                   | what it is |
//! |---------------------------|------------|
//! | `records PORT FILE`       | TCP server that appends numbered records to a file and acknowledges each once it is on disk |
//! | `run PORT`                | TCP server that runs shell lines (tests only) |
//! | `blast PORT`              | TCP server that returns every byte it gets |
//! | `dirty PAGES INTERVAL_MS` | rewrites PAGES pages of memory every INTERVAL_MS (0: continuously) |
//! | `load DIR`                | compile-like load: short processes, small files, some arithmetic |
//! | `ask SERVER append FILE`  | appends records at another guest's server, HOST:PORT, and keeps count in FILE |
//! | `ask SERVER ping SECONDS` | measures round trips to it |
//! | `clock PORT`              | TCP server that shows the clocks and whether they ever went backwards (tests only) |
//! | `bank NAME PORT PEER…`    | pays money to its peers, HOST:PORT, over TCP and UDP, and is paid (tests only) |
//! | `search PORT MIB PEER…`   | holds MIB MiB of documents in memory, and looks them up here and at its peers, HOST:PORT (measurements only) |
//! | `await-ports PORT…`       | returns once every port accepts connections |
//!
//! The protocols are documented in the modules.

mod ask;
mod bank;
mod blast;
mod clock;
mod dirty;
mod load;
mod once;
mod records;
mod run;
mod search;
mod server;

use std::process::ExitCode;

const USAGE: &str = "usage: guest-tools records PORT FILE | run PORT | blast PORT \
                     | clock PORT | dirty PAGES INTERVAL_MS | load DIR [PAUSE_MS] | ask SERVER append FILE \
                     | ask SERVER ping SECONDS | bank NAME PORT PEER... | search PORT MIB PEER... \
                     | await-ports PORT...";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match dispatch(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("guest-tools: {message}");
            ExitCode::FAILURE
        }
    }
}

fn dispatch(arguments: &[String]) -> Result<(), String> {
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match words.as_slice() {
        ["records", port, file] => records::serve(number("PORT", port)?, file.as_ref()),
        ["run", port] => run::serve(number("PORT", port)?),
        ["blast", port] => blast::serve(number("PORT", port)?),
        ["clock", port] => clock::serve(number("PORT", port)?),
        ["dirty", pages, interval] => {
            dirty::rewrite_forever(number("PAGES", pages)?, number("INTERVAL_MS", interval)?)
        }
        ["load", directory] => load::build_forever(directory.as_ref(), 0),
        ["load", directory, pause] => {
            load::build_forever(directory.as_ref(), number("PAUSE_MS", pause)?)
        }
        [load::COMPILE, source, object] => load::compile(source.as_ref(), object.as_ref()),
        ["ask", server, "append", file] => ask::append(server, file.as_ref()),
        ["ask", server, "ping", seconds] => ask::ping(server, number("SECONDS", seconds)?),
        ["bank", name, port, peers @ ..] => bank::run(name, number("PORT", port)?, peers),
        ["search", port, mib, peers @ ..] => {
            search::serve(number("PORT", port)?, number("MIB", mib)?, peers)
        }
        ["await-ports", ports @ ..] if !ports.is_empty() => ports
            .iter()
            .map(|port| number("PORT", port))
            .try_for_each(|port| port.and_then(server::await_port)),
        _ => Err(USAGE.to_owned()),
    }
}

/// Parses a numeric argument, naming it in the error.
fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, String> {
    text.parse().map_err(|_| format!("{name}: `{text}` is not a number that fits; {USAGE}"))
}
