//! Events in the API: as a list, awaited, and as a stream (server-sent events).

use super::access::Admitted;
use super::{Answer, Ending, Shared, invalid};
use crate::door::patient::Answering;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Extension, Query, State};
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

/// Time between two looks at whether the caller of a stream may still have it.
const CHECK: Duration = Duration::from_secs(5);

/// The events that are meant.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
pub(super) struct Which {
    /// Number that the events exceed.
    after: u64,
    /// The VM that they are about.
    vm: Option<VmName>,
    /// Time to wait for the first, in milliseconds, 30 s at most; a list only.
    wait_ms: u64,
}

type Asked = Result<Query<Which>, QueryRejection>;

pub(super) async fn list(
    State(host): Shared,
    State(ending): State<Ending>,
    asked: Asked,
) -> Answer<EventList> {
    let Query(which) = asked.map_err(|rejection| invalid(rejection.body_text()))?;
    let deadline = Instant::now() + Duration::from_millis(which.wait_ms).min(LONGEST_WAIT);
    let (journal, mut from) = (host.events(), which.after);
    loop {
        let list = journal.after(from, which.vm.as_ref());
        if !list.events.is_empty()
            || list.missed
            || !await_event(&journal, list.last, deadline, &ending).await
        {
            return Ok(Json(list));
        }
        from = list.last;
    }
}

/// Waits until there is an event after this number; whether there may be one. Nothing runs meanwhile: each keeper's
/// daemon waits here all the time.
async fn await_event(journal: &Journal, last: u64, deadline: Instant, ending: &Ending) -> bool {
    tokio::select! {
        () = journal.await_other_than(last) => {}
        () = ending.begins() => {}
        () = tokio::time::sleep_until(deadline.into()) => {}
    }
    journal.last() != last
}

pub(super) async fn stream(
    State(host): Shared,
    State(ending): State<Ending>,
    Extension(admitted): Extension<Admitted>,
    headers: HeaderMap,
    asked: Asked,
) -> Response {
    let Query(mut which) = match asked {
        Ok(which) => which,
        Err(rejection) => return invalid(rejection.body_text()).into_response(),
    };
    // What a browser says when it comes back.
    let last = headers.get("last-event-id").and_then(|value| value.to_str().ok()?.parse().ok());
    which.after = last.unwrap_or(which.after);
    let (journal, ready, _going) = (host.events(), VecDeque::new(), admitted.go_on());
    let told = Told { journal, which, ready, admitted, ending, _going };
    Sse::new(told.sent()).keep_alive(KeepAlive::default()).into_response()
}

/// A stream of events.
struct Told {
    journal: Journal,
    which: Which,
    /// Messages that are to be sent next.
    ready: VecDeque<Sent>,
    admitted: Admitted,
    ending: Ending,
    _going: Option<Answering>,
}

impl Told {
    /// Ends when the daemon does, or its caller may have it no more.
    fn sent(self) -> impl Stream<Item = Result<Sent, Infallible>> {
        stream::unfold(self, |mut told| async move {
            loop {
                if let Some(next) = told.ready.pop_front() {
                    return Some((Ok(next), told));
                }
                if !told.admitted.still_counts() {
                    return None;
                }
                told.look();
                if told.ready.is_empty() {
                    let patience = Instant::now() + CHECK;
                    let after = told.which.after;
                    let may_be = await_event(&told.journal, after, patience, &told.ending).await;
                    if !may_be && (told.journal.is_closed() || told.ending.has_begun()) {
                        return None;
                    }
                }
            }
        })
    }

    /// Has ready what has happened since.
    fn look(&mut self) {
        let list = self.journal.after(self.which.after, self.which.vm.as_ref());
        self.which.after = list.last;
        if list.missed {
            self.ready.push_back(Sent::default().event("missed").data("{}"));
        }
        self.ready.extend(list.events.iter().map(one));
    }
}

fn one(event: &Event) -> Sent {
    let sent = Sent::default().id(event.number.to_string());
    // An event is made of names, numbers and words, which all have a JSON form.
    sent.json_data(event).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::task::{Context, Poll, Wake, Waker};
    use tokio::time::timeout;
    use understudy_report::events::EventKind;

    /// The daemon always waits for its keepers' next events, and no keeper ended before it had given that up.
    #[tokio::test]
    async fn who_waits_for_events_is_answered_when_the_api_ends() {
        let (journal, ending) = (Journal::default(), Ending::default());
        let far = Instant::now() + Duration::from_secs(3600);
        let mut waiting = Box::pin(await_event(&journal, journal.last(), far, &ending));
        let nothing = timeout(Duration::from_millis(50), &mut waiting).await;
        assert!(nothing.is_err(), "nothing has happened");
        ending.begin();
        assert_eq!(timeout(Duration::from_secs(60), waiting).await, Ok(false));
    }

    /// Times that somebody who waits was woken.
    #[derive(Default)]
    struct Woken(AtomicU32);

    impl Wake for Woken {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Each keeper looked twenty times a second whether there was something for its daemon.
    #[tokio::test]
    async fn who_waits_for_events_is_woken_by_one_and_by_nothing_else() {
        let (journal, ending, woken) = <(Journal, Ending, Arc<Woken>)>::default();
        let far = Instant::now() + Duration::from_secs(3600);
        let mut waiting = Box::pin(await_event(&journal, journal.last(), far, &ending));
        let waker = Waker::from(woken.clone());
        let mut context = Context::from_waker(&waker);
        assert!(waiting.as_mut().poll(&mut context).is_pending());
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(woken.0.load(Ordering::Relaxed), 0);
        journal.record(EventKind::Rebooted);
        assert!(woken.0.load(Ordering::Relaxed) > 0);
        assert_eq!(waiting.as_mut().poll(&mut context), Poll::Ready(true));
    }
}
