//! The words of a hostile host: messages of every kind, genuine ones with something wrong, and
//! noise.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use serde_json::{Value, json};
use understudy_protocol::Epoch;
use understudy_protocol::wire::{Kind, Message};

/// The most bytes of one message's payload: what is repeated in what is repeated grows fast.
const MOST_BYTES: usize = 1 << 20;

/// Numbers that something may be indexed, multiplied or waited with.
const NUMBERS: [u64; 12] =
    [0, 1, 2, 3, 63, 255, 65_535, 1 << 31, (1 << 32) - 1, 1 << 63, u64::MAX - 1, u64::MAX];

/// A source of hostile words, the same for the same seed.
pub struct Words {
    random: ChaCha8Rng,
    /// A path that nobody may touch.
    forbidden: String,
}

impl Words {
    pub fn new(seed: u64, forbidden: &str) -> Words {
        Words { random: ChaCha8Rng::seed_from_u64(seed), forbidden: forbidden.to_owned() }
    }

    /// A number below `bound`.
    pub fn below(&mut self, bound: usize) -> usize {
        (self.random.next_u64() % bound as u64) as usize
    }

    fn one_in(&mut self, times: usize) -> bool {
        self.below(times) == 0
    }

    fn number(&mut self) -> u64 {
        match self.one_in(3) {
            true => self.random.next_u64(),
            false => NUMBERS[self.below(NUMBERS.len())],
        }
    }

    fn text(&mut self) -> String {
        let path = self.forbidden.clone();
        match self.below(9) {
            0 => String::new(),
            1 => format!("../../../../../../../..{path}"),
            2 => path,
            3 => format!("file://{path}"),
            4 => "..".to_owned(),
            5 => "a".repeat(1 << self.below(17)),
            6 => "x\0y\n\u{1b}[2J".to_owned(),
            7 => "evil".to_owned(),
            _ => format!("{}", self.number()),
        }
    }

    fn value(&mut self) -> Value {
        match self.below(8) {
            0 => Value::Null,
            1 => json!(self.one_in(2)),
            2 | 3 => json!(self.number()),
            4 => json!(-(self.number() as i64 / 2)),
            5 => json!([]),
            6 => json!({}),
            _ => json!(self.text()),
        }
    }

    /// The same with some of its values, at any depth, replaced, left out or repeated.
    pub fn spoilt(&mut self, genuine: &Value) -> Value {
        match genuine {
            _ if self.one_in(24) => self.value(),
            Value::Object(fields) => {
                let mut spoilt = serde_json::Map::new();
                for (name, value) in fields {
                    if !self.one_in(40) {
                        spoilt.insert(name.clone(), self.spoilt(value));
                    }
                }
                Value::Object(spoilt)
            }
            Value::Array(all) => {
                let mut spoilt: Vec<Value> = all.iter().map(|one| self.spoilt(one)).collect();
                if self.one_in(12) {
                    let again = spoilt.first().cloned().unwrap_or(Value::Null);
                    let times = 1 << self.below(10);
                    spoilt.extend(std::iter::repeat_n(again, times));
                }
                Value::Array(spoilt)
            }
            Value::String(_) if self.one_in(16) => json!(self.text()),
            Value::Number(_) if self.one_in(8) => json!(self.number()),
            other => other.clone(),
        }
    }

    fn noise(&mut self) -> Vec<u8> {
        let most = 1 << self.below(15);
        let mut bytes = vec![0; self.below(most)];
        self.random.fill_bytes(&mut bytes);
        // Small numbers in front get further than noise.
        for at in 0..bytes.len().min(24) {
            if self.one_in(2) {
                bytes[at] = u8::from(self.one_in(3));
            }
        }
        bytes
    }

    fn epoch(&mut self) -> Epoch {
        match self.one_in(3) {
            true => Epoch(self.number()),
            false => Epoch(self.below(4) as u64),
        }
    }

    /// A message: a genuine one with something wrong, or one of any kind with noise, or with the words of another kind.
    pub fn message(&mut self, genuine: &[(Kind, Value)]) -> Vec<u8> {
        let any = Kind::ALL[self.below(Kind::ALL.len())];
        let (kind, body) = genuine[self.below(genuine.len())].clone();
        let (kind, payload) = match self.below(8) {
            0 => (any, Vec::new()),
            1 => (any, self.spoilt(&body).to_string().into_bytes()),
            2..4 => (any, self.noise()),
            4 => (kind, body.to_string().into_bytes()),
            _ => (kind, self.spoilt(&body).to_string().into_bytes()),
        };
        let epoch = if self.one_in(2) { Epoch(0) } else { self.epoch() };
        let mut bytes = on_wire(kind, epoch, payload);
        if self.one_in(64) {
            // A header, or a checksum, that lies.
            let at = self.below(bytes.len());
            bytes[at] ^= 1 << self.below(8);
        }
        bytes
    }

    /// JSON of this kind, with something wrong now and then.
    pub fn json(&mut self, kind: Kind, genuine: &Value) -> Vec<u8> {
        let body = if self.one_in(3) { genuine.clone() } else { self.spoilt(genuine) };
        on_wire(kind, Epoch(0), body.to_string().into_bytes())
    }
}

/// The bytes of a message.
pub fn on_wire(kind: Kind, epoch: Epoch, mut payload: Vec<u8>) -> Vec<u8> {
    payload.truncate(MOST_BYTES);
    let message = Message::new(kind, epoch, payload);
    [&message.header.encode(), message.payload.as_slice()].concat()
}
