//! Fields of the kernel's tables, such as `/proc/meminfo` and a process's `status`: `NAME: NUMBER kB`.

use std::io;
use std::path::Path;

/// A field of the file, in bytes.
pub fn field_bytes(file: &Path, name: &str) -> io::Result<u64> {
    let text = std::fs::read_to_string(file)?;
    let missing = || io::Error::other(format!("{} has no {name}", file.display()));
    bytes_in(&text, name).ok_or_else(missing)
}

/// The same of its text; none if it does not have the field.
pub fn bytes_in(text: &str, name: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_read_in_bytes() {
        let text = "MemTotal:       24576 kB\nMemAvailable:   12 kB\n";
        assert_eq!(bytes_in(text, "MemTotal:"), Some(24576 * 1024));
        assert_eq!(bytes_in(text, "MemFree:"), None);
    }

    #[test]
    fn what_a_file_lacks_is_named() {
        assert!(field_bytes(Path::new("/proc/meminfo"), "MemAvailable:").unwrap() > 0);
        assert!(field_bytes(Path::new("/proc/self/status"), "RssAnon:").unwrap() > 0);
        let error = field_bytes(Path::new("/proc/meminfo"), "Nonsense:").unwrap_err().to_string();
        assert!(error.contains("/proc/meminfo") && error.contains("Nonsense"), "{error}");
    }
}
