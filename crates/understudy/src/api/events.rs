//! Events in the API: as a list, awaited, and as a stream (server-sent events).

use super::{Answer, Shared, invalid};
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::http::HeaderMap;
use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Json, Response};
use futures_util::stream::{self, Stream};
use schemars::JsonSchema;
use serde::Deserialize;
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::{Duration, Instant};
use understudy_client::LONGEST_WAIT;
use understudy_protocol::VmName;
use understudy_report::events::{Event, EventList, Journal};

/// Between two looks at the number of the last event.
const LOOK: Duration = Duration::from_millis(50);

/// Which events are meant.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Which {
    /// Only events with a larger number.
    after: u64,
    /// Only those about this VM.
    vm: Option<VmName>,
    /// Wait so long for the first, 30 s at most; a list only.
    wait_ms: u64,
}

type Asked = Result<Query<Which>, QueryRejection>;

pub(super) async fn list(State(host): Shared, asked: Asked) -> Answer<EventList> {
    let Query(which) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    let deadline = Instant::now() + Duration::from_millis(which.wait_ms).min(LONGEST_WAIT);
    let (journal, mut from) = (host.events(), which.after);
    loop {
        let list = journal.after(from, which.vm.as_ref());
        if !list.events.is_empty()
            || list.missed
            || !await_event(&journal, list.last, deadline).await
        {
            return Ok(Json(list));
        }
        from = list.last;
    }
}

/// Waits until there is an event after this number; whether there may be one.
async fn await_event(journal: &Journal, last: u64, deadline: Instant) -> bool {
    while journal.last() == last {
        if journal.is_closed() || Instant::now() >= deadline {
            return false;
        }
        tokio::time::sleep(LOOK).await;
    }
    true
}

pub(super) async fn stream(State(host): Shared, headers: HeaderMap, asked: Asked) -> Response {
    let Query(mut which) = match asked {
        Ok(which) => which,
        Err(rejection) => return invalid(rejection.body_text()).into_response(),
    };
    // What a browser says when it comes back.
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()?.parse().ok());
    which.after = last.unwrap_or(which.after);
    Sse::new(sent(host.events(), which)).keep_alive(KeepAlive::default()).into_response()
}

/// Ends when the daemon does.
fn sent(journal: Journal, which: Which) -> impl Stream<Item = Result<Sent, Infallible>> {
    let ready: VecDeque<Sent> = VecDeque::new();
    stream::unfold((journal, which, ready), |(journal, mut which, mut ready)| async move {
        loop {
            if let Some(next) = ready.pop_front() {
                return Some((Ok(next), (journal, which, ready)));
            }
            let list = journal.after(which.after, which.vm.as_ref());
            which.after = list.last;
            if list.missed {
                ready.push_back(Sent::default().event("missed").data("{}"));
            }
            ready.extend(list.events.iter().map(one));
            if ready.is_empty() {
                let patience = Instant::now() + LONGEST_WAIT;
                if !await_event(&journal, which.after, patience).await && journal.is_closed() {
                    return None;
                }
            }
        }
    })
}

fn one(event: &Event) -> Sent {
    let sent = Sent::default().id(event.number.to_string());
    // An event is made of names, numbers and words, which all have a JSON form.
    sent.json_data(event).unwrap_or_default()
}
