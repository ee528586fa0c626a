//! The fixed newstyle handshake, until the client has chosen our export.

use super::protocol::{
    ClientFlags, ClientOption, Malformed, OPTION_HEADER_BYTES, OptionHeader, OptionReply,
    export_name_answer, greeting,
};
use std::io::{self, Read, Write};

/// A client that has not chosen after so many options never will.
const MAX_OPTIONS: usize = 64;

/// Reason why a connection came to an end other than by the client's wish.
#[derive(Debug, thiserror::Error)]
pub(super) enum ConnectionError {
    #[error("malformed bytes: {0}")]
    Malformed(#[from] Malformed),
    #[error("the client asked for an export of another name")]
    UnknownExport,
    #[error("the client sent {MAX_OPTIONS} options and chose no export")]
    TooManyOptions,
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Decision of the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Use of the export: requests follow.
    Transmission,
    /// End of the connection.
    Abort,
}

/// The one export of a server. The empty name means it too.
#[derive(Clone, Debug)]
pub(super) struct Export {
    pub(super) name: String,
    pub(super) bytes: u64,
}

impl Export {
    fn is_called(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.name.as_bytes()
    }
}

/// Greets the client and answers its options.
pub(super) fn negotiate(
    input: &mut impl Read,
    output: &mut impl Write,
    export: &Export,
) -> Result<Outcome, ConnectionError> {
    output.write_all(&greeting())?;
    let mut flags = [0; 4];
    input.read_exact(&mut flags)?;
    let client = ClientFlags::parse(flags)?;

    let mut data = Vec::new();
    for _ in 0..MAX_OPTIONS {
        let mut header = [0; OPTION_HEADER_BYTES];
        input.read_exact(&mut header)?;
        let header = OptionHeader::parse(&header)?;
        data.resize(header.data_bytes, 0);
        input.read_exact(&mut data)?;

        let option = ClientOption::parse(header.code, &data);
        if let ClientOption::ExportName(name) = option {
            if !export.is_called(name) {
                // This option cannot be refused but by hanging up.
                return Err(ConnectionError::UnknownExport);
            }
            output.write_all(&export_name_answer(export.bytes, client))?;
            return Ok(Outcome::Transmission);
        }
        let (replies, outcome) = answer(option, export);
        let mut out = Vec::new();
        for reply in replies {
            reply.encode(header.code, &mut out);
        }
        output.write_all(&out)?;
        if let Some(outcome) = outcome {
            return Ok(outcome);
        }
    }
    Err(ConnectionError::TooManyOptions)
}

/// The replies to an option, and how the handshake ends if it ends with it.
fn answer<'a>(
    option: ClientOption<'_>,
    export: &'a Export,
) -> (Vec<OptionReply<'a>>, Option<Outcome>) {
    match option {
        ClientOption::Abort => (vec![OptionReply::Ack], Some(Outcome::Abort)),
        ClientOption::List => {
            (vec![OptionReply::Server { name: &export.name }, OptionReply::Ack], None)
        }
        ClientOption::Info { name, block_size, go } if export.is_called(name) => {
            let mut replies = vec![OptionReply::Export { bytes: export.bytes }];
            if block_size {
                replies.push(OptionReply::BlockSize);
            }
            replies.push(OptionReply::Ack);
            (replies, go.then_some(Outcome::Transmission))
        }
        ClientOption::Info { .. } => (vec![OptionReply::ErrUnknown], None),
        ClientOption::Invalid => (vec![OptionReply::ErrInvalid], None),
        // EXPORT_NAME, the one option without a reply, never comes here.
        ClientOption::Unsupported | ClientOption::ExportName(_) => {
            (vec![OptionReply::ErrUnsupported], None)
        }
    }
}

#[cfg(test)]
#[path = "handshake_tests.rs"]
mod tests;
