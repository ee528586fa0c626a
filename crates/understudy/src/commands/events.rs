//! `understudy events`.

use crate::cli::EventsArgs;
use crate::{output, table};
use understudy_client::{Client, Exit, Failure};
use understudy_report::events::EventList;

/// Shows what has happened, and with `--follow` what happens.
pub fn run(client: &Client, args: &EventsArgs, json: bool) -> Result<Exit, Failure> {
    let vm = args.vm.as_deref();
    let mut list = client.events(args.after, vm, false)?;
    if !args.follow {
        output::show(json, &list, |list| table::events(&list.events))?;
        return Ok(Exit::Ok);
    }
    loop {
        print(&list, json)?;
        list = client.events(list.last, vm, true)?;
    }
}

/// Prints one line for each event.
fn print(list: &EventList, json: bool) -> Result<(), Failure> {
    if list.missed {
        eprintln!("some events are not kept any more");
    }
    if !json {
        return output::print(&table::events(&list.events));
    }
    for event in &list.events {
        let line = serde_json::to_string(event)
            .map_err(|error| Failure::internal(format!("cannot write JSON: {error}")))?;
        output::print(&(line + "\n"))?;
    }
    Ok(())
}
