//! A text and descriptors, through a unix socket.

use nix::cmsg_space;
use nix::sys::socket::{ControlMessage, MsgFlags, UnixAddr, sendmsg};
use std::io::{self, ErrorKind, IoSlice, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use understudy_memory::receive_with_descriptors;

/// The most descriptors that the kernel passes with one message.
const MOST_DESCRIPTORS: usize = 253;
/// A definition and a few numbers; what is longer is not ours.
const MOST_BYTES: u64 = 16 << 20;

/// The descriptors go with the length of the text, which comes first.
pub fn send(stream: &UnixStream, text: &[u8], descriptors: &[OwnedFd]) -> io::Result<()> {
    let length = (text.len() as u64).to_le_bytes();
    let numbers: Vec<RawFd> = descriptors.iter().map(AsRawFd::as_raw_fd).collect();
    let beside = [ControlMessage::ScmRights(&numbers)];
    let payload = [IoSlice::new(&length)];
    let sent =
        sendmsg::<UnixAddr>(stream.as_raw_fd(), &payload, &beside, MsgFlags::MSG_NOSIGNAL, None)?;
    let mut stream = stream;
    stream.write_all(&length[sent..])?;
    stream.write_all(text)
}

/// Receives what the other end has sent.
pub fn receive(stream: &UnixStream) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut length = [0; 8];
    let mut control = cmsg_space!([RawFd; MOST_DESCRIPTORS]);
    let (received, descriptors) =
        receive_with_descriptors(stream, &mut length, &mut control, MsgFlags::empty())?;
    if received == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    let mut stream = stream;
    stream.read_exact(&mut length[received..])?;
    let bytes = u64::from_le_bytes(length);
    if bytes > MOST_BYTES {
        return Err(io::Error::new(ErrorKind::InvalidData, format!("a text of {bytes} bytes")));
    }
    let mut text = vec![0; bytes as usize];
    stream.read_exact(&mut text)?;
    Ok((text, descriptors))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::thread;

    #[test]
    fn a_long_text_and_its_descriptors_arrive() {
        let (one, other) = UnixStream::pair().unwrap();
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"content").unwrap();
        let descriptors: Vec<OwnedFd> =
            (0..MOST_DESCRIPTORS).map(|_| file.try_clone().unwrap().into()).collect();
        let text = vec![b'x'; 1 << 20];
        let sender = thread::spawn({
            let text = text.clone();
            move || send(&one, &text, &descriptors).unwrap()
        });
        let (received, descriptors) = receive(&other).unwrap();
        sender.join().unwrap();
        assert!(received == text);
        assert_eq!(descriptors.len(), MOST_DESCRIPTORS);
        let last = File::from(descriptors.into_iter().last().unwrap());
        assert_eq!(last.metadata().unwrap().len(), 7);
        assert!(receive(&other).is_err(), "the other end is gone");
    }
}
