//! A client of etcd, as small as the daemon's needs: read, compare-and-swap,
//! keys under a lease.
//!
//! It speaks etcd's v3 JSON gateway, so that a blocking HTTP client is enough.
//! Every request has a deadline, takes a connection of its own (after a
//! partition no answer is awaited on a dead one), and goes to the next endpoint
//! when one does not answer.

mod access;

use crate::EtcdConfig;
use access::Access;
use anyhow::{Context, bail, ensure};
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// etcd's word for a revision that it has no more.
const COMPACTED: &str = "has been compacted";

/// One etcd cluster. Clones share it.
#[derive(Clone, Debug)]
pub struct Etcd {
    access: Arc<Access>,
    endpoints: Arc<[String]>,
    prefix: String,
    /// The endpoint that answered last.
    preferred: Arc<AtomicUsize>,
    /// The cluster that alone is meant, once it is known.
    cluster: Arc<OnceLock<Cluster>>,
}

/// The number by which etcd tells a cluster from others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster(u64);

impl Cluster {
    /// The one that this is an answer of; none if it is no answer of etcd's gateway.
    fn of(answer: &Value) -> Option<Cluster> {
        let header = answer.get("header").or_else(|| answer["result"].get("header"))?;
        header["cluster_id"].as_str()?.parse().ok().map(Cluster)
    }
}

impl fmt::Display for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// A value and when it was last changed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry<T> {
    /// The key, without the configured prefix.
    pub key: String,
    /// Its value.
    pub value: T,
    /// etcd's revision of the last change of this key.
    pub revision: i64,
}

/// A lease: what is put under it vanishes when it is not kept alive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lease(i64);

impl Etcd {
    /// The cluster of `config`. Does not ask it yet; an error is about the files
    /// of its `[arbiter]` section.
    pub fn new(config: &EtcdConfig) -> anyhow::Result<Etcd> {
        Ok(Etcd {
            access: Arc::new(Access::new(config.endpoints.tls())?),
            endpoints: config.endpoints.urls().collect(),
            prefix: config.prefix.clone(),
            preferred: Arc::default(),
            cluster: Arc::default(),
        })
    }

    /// Problem that the operator should see to, for people: certificates that have changed and are
    /// not used.
    pub fn problem(&self) -> Option<String> {
        self.access.problem()
    }

    /// The entry of a key, if there is one; as the whole cluster knows it.
    pub fn get<T: DeserializeOwned>(&self, key: &str) -> anyhow::Result<Option<Entry<T>>> {
        self.get_from(key).map(|(entry, _)| entry)
    }

    /// The same, and which cluster it is.
    pub fn get_from<T: DeserializeOwned>(
        &self,
        key: &str,
    ) -> anyhow::Result<(Option<Entry<T>>, Cluster)> {
        let answer = self.call("kv/range", &json!({ "key": self.encode(key) }))?;
        let cluster = Cluster::of(&answer).context("it names no cluster")?;
        Ok((self.entries(&answer["kvs"])?.pop(), cluster))
    }

    /// From here on answers of no other cluster count: an endpoint of one is as one that does not answer.
    pub fn keep_to(&self, cluster: Cluster) {
        self.cluster.get_or_init(|| cluster);
    }

    /// Every entry whose key begins with `folder`.
    pub fn list<T: DeserializeOwned>(&self, folder: &str) -> anyhow::Result<Vec<Entry<T>>> {
        let answer = self.call("kv/range", &self.range(folder)?)?;
        self.entries(&answer["kvs"])
    }

    /// Every key that begins with `folder`, whatever its value is.
    pub fn keys(&self, folder: &str) -> anyhow::Result<Vec<String>> {
        let mut range = self.range(folder)?;
        range["keys_only"] = json!(true);
        let answer = self.call("kv/range", &range)?;
        answer["kvs"].as_array().into_iter().flatten().map(|entry| self.key(entry)).collect()
    }

    fn range(&self, folder: &str) -> anyhow::Result<Value> {
        let mut end = format!("{}{folder}", self.prefix).into_bytes();
        // The first key behind all of the folder's; '/' is not the last byte there is.
        *end.last_mut().context("a folder has a name")? += 1;
        let end = BASE64_STANDARD.encode(end);
        Ok(json!({ "key": self.encode(folder), "range_end": end }))
    }

    /// Puts `value` if the key was last changed at `revision` (0: if there is no
    /// such key); whether it did.
    pub fn swap(&self, key: &str, revision: i64, value: &impl Serialize) -> anyhow::Result<bool> {
        self.transact(&[(key, revision)], &[self.put_request(key, value)?])
    }

    /// The same if `guard` was last changed at that revision, too.
    pub fn swap_guarded(
        &self,
        (key, revision): (&str, i64),
        guard: (&str, i64),
        value: &impl Serialize,
    ) -> anyhow::Result<bool> {
        self.transact(&[(key, revision), guard], &[self.put_request(key, value)?])
    }

    /// Removes the key if it was last changed at `revision`, and `guard` at that one, which gets a new one: whether it did. So
    /// no [guarded](Etcd::swap_guarded) request of before is carried out from then on, though the key has no revision any more.
    pub fn remove_guarded(
        &self,
        (key, revision): (&str, i64),
        guard: (&str, i64),
    ) -> anyhow::Result<bool> {
        let remove = json!({ "request_delete_range": { "key": self.encode(key) } });
        let requests = [remove, self.put_request(guard.0, &true)?];
        self.transact(&[(key, revision), guard], &requests)
    }

    /// Does all of it if each of these keys was last changed at its revision; whether it did.
    fn transact(&self, unchanged: &[(&str, i64)], requests: &[Value]) -> anyhow::Result<bool> {
        self.transact_or(unchanged, requests, &[])
    }

    /// The same, or else all of `otherwise`.
    fn transact_or(
        &self,
        unchanged: &[(&str, i64)],
        requests: &[Value],
        otherwise: &[Value],
    ) -> anyhow::Result<bool> {
        let compare = |(key, revision): &(&str, i64)| {
            json!({
                "key": self.encode(key), "target": "MOD", "result": "EQUAL",
                "mod_revision": revision.to_string(),
            })
        };
        let compare: Vec<Value> = unchanged.iter().map(compare).collect();
        let body = json!({ "compare": compare, "success": requests, "failure": otherwise });
        let answer = self.call("kv/txn", &body)?;
        // The gateway leaves out what is false.
        Ok(answer["succeeded"] == true)
    }

    fn put_request(&self, key: &str, value: &impl Serialize) -> anyhow::Result<Value> {
        let put = json!({ "key": self.encode(key), "value": encode_value(value)? });
        Ok(json!({ "request_put": put }))
    }

    /// The transaction of [`Etcd::swap`], which instead removes a key that is not there: whether
    /// `key` was last changed at `revision`. It makes no revision of its own, of which etcd keeps every one until they are
    /// compacted: it would put something if `key` had changed, and one that puts something is refused where etcd has no
    /// space left, or the host no right to write, whichever way it goes.
    pub fn rehearse(&self, key: &str, revision: i64, nothing: &str) -> anyhow::Result<bool> {
        let remove = json!({ "request_delete_range": { "key": self.encode(nothing) } });
        let put = self.put_request(nothing, &true)?;
        self.transact_or(&[(key, revision)], &[remove], &[put])
    }

    /// A new lease of `seconds`.
    pub fn lease(&self, seconds: u64) -> anyhow::Result<Lease> {
        let answer = self.call("lease/grant", &json!({ "TTL": seconds.to_string() }))?;
        integer(&answer["ID"]).map(Lease).context("etcd granted no lease")
    }

    /// Keeps a lease alive; whether there still is such a lease.
    pub fn keep_alive(&self, lease: Lease) -> anyhow::Result<bool> {
        let answer = self.call("lease/keepalive", &json!({ "ID": lease.0.to_string() }))?;
        Ok(integer(&answer["result"]["TTL"]).is_some_and(|seconds| seconds > 0))
    }

    /// Ends a lease, and with it what was put under it.
    pub fn revoke(&self, lease: Lease) -> anyhow::Result<()> {
        self.call("lease/revoke", &json!({ "ID": lease.0.to_string() })).map(drop)
    }

    /// Puts a value under a lease: it vanishes with that.
    pub fn put(&self, key: &str, value: &impl Serialize, lease: Lease) -> anyhow::Result<()> {
        let (key, lease) = (self.encode(key), lease.0.to_string());
        let body = json!({ "key": key, "value": encode_value(value)?, "lease": lease });
        self.call("kv/put", &body).map(drop)
    }

    /// Whether etcd still has the revision that was the newest one so many ago: it keeps each until it is told to compact
    /// them, and takes nothing more once its space is full of them.
    pub fn keeps_all(&self, of_the_last: i64) -> anyhow::Result<bool> {
        let mut range = json!({ "key": self.encode("/"), "count_only": true });
        let now = self.call("kv/range", &range)?;
        let now = integer(&now["header"]["revision"]).context("etcd named no revision")?;
        if now <= of_the_last {
            return Ok(false);
        }
        range["revision"] = json!((now - of_the_last).to_string());
        match self.call("kv/range", &range) {
            Ok(_) => Ok(true),
            Err(error) if error.to_string().contains(COMPACTED) => Ok(false),
            Err(error) => Err(error),
        }
    }

    fn encode(&self, key: &str) -> String {
        BASE64_STANDARD.encode(format!("{}{key}", self.prefix))
    }

    fn entries<T: DeserializeOwned>(&self, list: &Value) -> anyhow::Result<Vec<Entry<T>>> {
        list.as_array().into_iter().flatten().map(|entry| self.entry(entry)).collect()
    }

    fn entry<T: DeserializeOwned>(&self, entry: &Value) -> anyhow::Result<Entry<T>> {
        let key = self.key(entry)?;
        let value = serde_json::from_slice(&decoded(entry, "value")?)
            .with_context(|| format!("etcd's value of {}{key} is not Understudy's", self.prefix))?;
        let revision = integer(&entry["mod_revision"]).context("etcd named no revision")?;
        Ok(Entry { key, value, revision })
    }

    /// An entry's key, without the prefix.
    fn key(&self, entry: &Value) -> anyhow::Result<String> {
        let key = String::from_utf8_lossy(&decoded(entry, "key")?).into_owned();
        Ok(key.strip_prefix(&self.prefix).unwrap_or(&key).to_owned())
    }

    /// Asks the endpoints one after the other, beginning with the one that
    /// answered last. A request that no answer came to may have been carried out.
    fn call(&self, method: &str, body: &Value) -> anyhow::Result<Value> {
        let first = self.preferred.load(Ordering::Relaxed);
        let mut failures = Vec::new();
        for turn in 0..self.endpoints.len() {
            let index = (first + turn) % self.endpoints.len();
            let endpoint = &self.endpoints[index];
            match self.ask(endpoint, method, body) {
                Ok(answer) => {
                    self.preferred.store(index, Ordering::Relaxed);
                    return Ok(answer);
                }
                Err(error) => failures.push(format!("{endpoint}: {error:#}")),
            }
        }
        bail!("etcd does not answer: {}", failures.join("; "))
    }

    fn ask(&self, endpoint: &str, method: &str, body: &Value) -> anyhow::Result<Value> {
        let agent = self.access.agent();
        let mut response = agent.post(format!("{endpoint}/v3/{method}")).send_json(body)?;
        let status = response.status();
        let answer: Value = response
            .body_mut()
            .read_json()
            .with_context(|| format!("HTTP status {status} and no JSON"))?;
        let words = answer["message"].as_str().or(answer["error"].as_str());
        ensure!(status.is_success(), "HTTP status {status}: {}", words.unwrap_or("no reason"));
        let cluster = Cluster::of(&answer).context("it is no etcd: its answer names no cluster")?;
        if let Some(known) = self.cluster.get().filter(|known| **known != cluster) {
            bail!(
                "it is a member of the cluster {cluster}, and {known} is used: are all endpoints \
                 members of one, and was it set up anew, or restored?"
            );
        }
        Ok(answer)
    }
}

fn decoded(entry: &Value, field: &str) -> anyhow::Result<Vec<u8>> {
    let encoded = entry[field].as_str().unwrap_or_default();
    BASE64_STANDARD.decode(encoded).with_context(|| format!("malformed {field} from etcd"))
}

fn encode_value(value: &impl Serialize) -> anyhow::Result<String> {
    Ok(BASE64_STANDARD.encode(serde_json::to_vec(value)?))
}

/// The gateway writes 64-bit numbers as strings.
fn integer(value: &Value) -> Option<i64> {
    value.as_str().and_then(|text| text.parse().ok()).or(value.as_i64())
}
