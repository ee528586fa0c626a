//! The RAM blocks that a machine has: the text of `x-query-ramblock`.

/// One of the machine's RAM blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamBlockInfo {
    /// QEMU's name; the same on both hosts.
    pub name: String,
    /// The block's address in QEMU's address space.
    pub address: u64,
    /// The length in use: what the guest can see. QEMU maps `max_bytes`; a
    /// firmware that rebuilds its ACPI tables may make it use more of them, so
    /// ask again after a reset.
    pub bytes: u64,
    /// The length that QEMU has mapped.
    pub max_bytes: u64,
}

impl RamBlockInfo {
    /// Whether this is the guest's main memory, which the daemon shares.
    pub fn is_main(&self) -> bool {
        self.name == "ram"
    }
}

/// Reads the table; says which line it does not understand.
pub(super) fn parse(text: &str) -> Result<Vec<RamBlockInfo>, String> {
    let lines = text.lines().filter(|line| !line.trim().is_empty());
    lines.skip(1).map(|line| parse_line(line).ok_or_else(|| format!("line \"{line}\""))).collect()
}

/// Name, page size with unit, offset, used, total, address in QEMU, rights.
fn parse_line(line: &str) -> Option<RamBlockInfo> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let [name @ .., _page, _unit, _offset, used, total, address, _rights] = words.as_slice() else {
        return None;
    };
    if name.is_empty() {
        return None;
    }
    let hex = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
    let (bytes, max_bytes) = (hex(used)?, hex(total)?);
    (bytes <= max_bytes).then_some(())?;
    Some(RamBlockInfo { name: name.join(" "), address: hex(address)?, bytes, max_bytes })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Text of QEMU 10.0.2, q35 with 256 MiB.
    const TEXT: &str = "              Block Name    PSize              Offset               Used              Total                HVA  RO
                     ram    4 KiB  0x0000000000000000 0x0000000010000000 0x0000000010000000 0x00007f3983fff000  rw
    /rom@etc/acpi/tables    4 KiB  0x0000000010080000 0x0000000000020000 0x0000000000200000 0x00007f3983200000  ro
   0000:00:01.0/vga.vram    4 KiB  0x0000000010080000 0x0000000001000000 0x0000000001000000 0x00007f39d8400000  rw

";

    #[test]
    fn real_output_is_understood() {
        let blocks = parse(TEXT).unwrap();
        assert_eq!(blocks.len(), 3);
        assert!(blocks[0].is_main() && !blocks[1].is_main());
        assert_eq!((blocks[0].bytes, blocks[0].address), (256 << 20, 0x7f39_83ff_f000));
        let tables = RamBlockInfo {
            name: "/rom@etc/acpi/tables".to_owned(),
            address: 0x7f39_8320_0000,
            bytes: 0x2_0000,
            max_bytes: 0x20_0000,
        };
        assert_eq!(blocks[1], tables);
        assert_eq!(blocks[2].name, "0000:00:01.0/vga.vram");
    }

    #[test]
    fn other_output_is_refused() {
        let cut = &TEXT[..TEXT.len() - 20];
        for text in [cut, "header\nram 4 KiB 0x0 0x2 0x1 0x1000 rw", "header\n4 KiB 0 1 1 1 rw"] {
            assert!(parse(text).is_err(), "{text}");
        }
    }
}
