//! An etcd that others only pretend to be, or of which another one is asked for.

use super::*;
use crate::{EtcdConfig, EtcdEndpoints};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use understudy_protocol::literal;

const KEY: &str = "/identity";

/// Gives the answer to one request, of which it has the path and the body.
fn answer(mut connection: TcpStream, with: impl Fn(&str, &Value) -> Value) -> std::io::Result<()> {
    let mut reader = BufReader::new(connection.try_clone()?);
    let (mut path, mut length) = (String::new(), 0);
    for line in reader.by_ref().lines() {
        let line = line?.to_ascii_lowercase();
        match line.split_once(' ') {
            _ if line.is_empty() => break,
            Some(("post", rest)) => path = rest.split(' ').next().unwrap_or_default().to_owned(),
            Some(("content-length:", bytes)) => length = bytes.trim().parse().unwrap_or(0),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let answer = with(&path, &serde_json::from_slice(&body)?).to_string();
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n";
    write!(connection, "{head}Content-Length: {}\r\n\r\n{answer}", answer.len())
}

/// A server that answers so many requests, then none.
fn serve(requests: usize, with: impl Fn(&str, &Value) -> Value + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for connection in listener.incoming().take(requests) {
            let _ = answer(connection.unwrap(), &with);
        }
    });
    format!("http://{address}")
}

/// A cluster of this number in which there is nothing but an identity.
fn cluster(number: u64) -> impl Fn(&str, &Value) -> Value {
    move |path, body| {
        let encoded = |text: &str| base64::Engine::encode(&base64::prelude::BASE64_STANDARD, text);
        let header = json!({ "cluster_id": number.to_string(), "revision": "7" });
        let key = encoded(KEY);
        let value = encoded(&format!("\"{}\"", "0".repeat(32)));
        match path {
            "/v3/kv/range" if body["key"] == key => json!({
                "header": header,
                "kvs": [{ "key": key, "value": value, "mod_revision": "3" }],
            }),
            "/v3/kv/txn" => json!({ "header": header, "succeeded": true }),
            _ => json!({ "header": header }),
        }
    }
}

fn arbiter(endpoints: &[String]) -> Arbiter {
    let endpoints = EtcdEndpoints::new(endpoints, None).unwrap();
    let config = ArbiterConfig::Etcd(EtcdConfig { endpoints, prefix: String::new() });
    Arbiter::new(&config, &literal("a")).unwrap()
}

/// Its endpoint was silent for a moment behind its identity, and an endpoint of another cluster, which knew of no
/// owner, granted what the first one said that another host had.
#[test]
fn only_the_cluster_whose_identity_was_read_is_asked() {
    let one = serve(usize::MAX, cluster(1));
    let granted =
        arbiter(std::slice::from_ref(&one)).claim(&literal::<VmName>("db"), Generation(0));
    assert_eq!(granted, Verdict::Granted(Generation(1)));
    let silent = serve(1, cluster(2));
    let verdict = arbiter(&[silent, one]).claim(&literal::<VmName>("db"), Generation(0));
    let Verdict::Unreachable(why) = verdict else { panic!("{verdict:?}") };
    assert!(why.contains("a member of the cluster 1, and 2 is used"), "{why}");
}

/// It was taken for a cluster that has no record.
#[test]
fn what_is_no_etcd_knows_nothing() {
    let proxy = serve(usize::MAX, |_, _| json!({}));
    let verdict = arbiter(&[proxy]).claim(&literal::<VmName>("db"), Generation(0));
    let Verdict::Unreachable(why) = verdict else { panic!("{verdict:?}") };
    assert!(why.contains("it is no etcd"), "{why}");
}
