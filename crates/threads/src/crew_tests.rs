use crate::{Crew, Waitable, Worker};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

/// A time longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A crew that sends what it is handed, after it has done this.
fn crew(
    name: &str,
    most: usize,
    before: impl Fn(u32) + Send + Sync + 'static,
) -> (Crew<u32>, Receiver<u32>) {
    let (done, results) = channel();
    let before = Arc::new(before);
    let worker = move || -> Worker<u32> {
        let (done, before) = (Sender::clone(&done), before.clone());
        Box::new(move |job| {
            before(job);
            done.send(job).unwrap();
        })
    };
    (Crew::new(name, most, worker), results)
}

/// Threads of this process that have the crew's name.
fn threads(name: &str) -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let name_of = |task: std::io::Result<std::fs::DirEntry>| {
        std::fs::read_to_string(task.unwrap().path().join("comm")).unwrap_or_default()
    };
    tasks.map(name_of).filter(|other| other.trim() == name).count()
}

#[test]
fn a_crew_has_as_many_threads_as_there_is_work_for_and_none_at_rest() {
    // Only three threads at once get past it.
    let barrier = Barrier::new(3);
    let name = "crew-at-rest";
    let (crew, results) = crew(name, 3, move |_| {
        barrier.wait();
    });
    assert_eq!(threads(name), 0, "before there is work");
    (0..6).for_each(|job| crew.hand(job));
    let mut done: Vec<u32> = (0..6).map(|_| results.recv_timeout(PATIENCE).unwrap()).collect();
    done.sort_unstable();
    assert_eq!(done, [0, 1, 2, 3, 4, 5]);
    assert_eq!(threads(name), 3);
    let deadline = Instant::now() + PATIENCE;
    while threads(name) > 0 {
        assert!(Instant::now() < deadline, "they stay though there is nothing to do");
        thread::sleep(Duration::from_millis(50));
    }
    (6..9).for_each(|job| crew.hand(job));
    assert_eq!((6..9).map(|_| results.recv_timeout(PATIENCE).unwrap()).sum::<u32>(), 21);
}

#[test]
fn one_thread_does_jobs_in_their_order_and_all_of_them_before_the_end() {
    let (crew, results) = crew("crew-of-one", 1, |_| thread::sleep(Duration::from_millis(1)));
    (0..50).for_each(|job| crew.hand(job));
    drop(crew);
    assert_eq!(results.try_iter().collect::<Vec<_>>(), (0..50).collect::<Vec<_>>());
}

#[test]
fn the_end_waits_for_no_thread_that_has_panicked() {
    let (crew, results) = crew("crew-panics", 1, |job| assert_ne!(job, 1, "a job that panics"));
    crew.hand(1);
    crew.hand(2);
    drop(crew);
    assert!(results.try_iter().count() <= 1);
}

#[test]
fn a_change_wakes_all_that_wait() {
    let value = Arc::new(Waitable::new(0));
    let waiters: Vec<_> = (1..4)
        .map(|wanted| {
            let value = value.clone();
            thread::spawn(move || {
                drop(value.wait_while(value.lock(), |value| *value < wanted));
            })
        })
        .collect();
    (1..4).for_each(|next| value.change(|value| *value = next));
    waiters.into_iter().for_each(|waiter| waiter.join().unwrap());
    let waited = value.wait_while_for(value.lock(), Duration::from_millis(1), |_| true);
    assert_eq!(*waited, 3, "nobody waits for ever who says for how long");
}

/// An image was locked although the crew that wrote to it was no more.
#[test]
fn nothing_of_a_crew_outlives_it() {
    for n in 0..300 {
        let held = Arc::new(());
        let (of_crew, done) = (held.clone(), channel());
        let sender = std::sync::Mutex::new(done.0);
        let worker = move || -> Worker<u32> {
            let (held, done) = (of_crew.clone(), sender.lock().unwrap().clone());
            Box::new(move |job| {
                let _held = &held;
                done.send(job).unwrap();
            })
        };
        let crew = Crew::new("crew-outlived", 3, worker);
        (0..3).for_each(|job| crew.hand(job));
        done.1.recv_timeout(PATIENCE).unwrap();
        drop(crew);
        assert_eq!(Arc::strong_count(&held), 1, "round {n}");
    }
}
