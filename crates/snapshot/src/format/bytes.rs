//! Reading numbers from bytes that somebody else wrote.

/// Bytes that are not what they should be, and what they are not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

/// Takes numbers from the front, little-endian; never reads past the end.
#[derive(Debug)]
pub(crate) struct Reader<'a>(pub &'a [u8]);

impl<'a> Reader<'a> {
    pub fn bytes(&mut self, count: usize) -> Result<&'a [u8], Malformed> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(Malformed("it ends too early"))?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Malformed> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Malformed("it ends too early"))?;
        self.0 = rest;
        Ok(*taken)
    }

    pub fn u8(&mut self) -> Result<u8, Malformed> {
        self.array().map(|[byte]| byte)
    }

    pub fn u16(&mut self) -> Result<u16, Malformed> {
        self.array().map(u16::from_le_bytes)
    }

    pub fn u32(&mut self) -> Result<u32, Malformed> {
        self.array().map(u32::from_le_bytes)
    }

    pub fn u64(&mut self) -> Result<u64, Malformed> {
        self.array().map(u64::from_le_bytes)
    }

    pub fn hash(&mut self) -> Result<[u8; 32], Malformed> {
        self.array()
    }

    /// A count of things that take at least `each` bytes: never more than there are bytes
    /// left, so that it may be trusted for an allocation.
    pub fn count(&mut self, each: usize) -> Result<usize, Malformed> {
        let count = self.u64()?;
        match count <= (self.0.len() / each) as u64 {
            true => Ok(count as usize),
            false => Err(Malformed("it has fewer entries than it says")),
        }
    }

    pub fn end(&self) -> Result<(), Malformed> {
        match self.0.is_empty() {
            true => Ok(()),
            false => Err(Malformed("something follows its end")),
        }
    }
}
