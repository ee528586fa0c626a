//! Postmark in the guest: many small files, as a mail server has them (Remus, section 3.3).

use super::{Bed, Sample, Scale, aside};
use anyhow::{Context, Result, ensure};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);
const TRANSACTIONS: (u32, u32) = (10_000, 5_000);
/// Files at the start; as it comes.
const FILES: u64 = 500;

pub fn run(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let transactions = scale.of(TRANSACTIONS.0, TRANSACTIONS.1);
    let mut shell = bed.shell()?;
    aside(&mut shell, "mkdir -p /work/postmark")?;
    let line = format!(
        "printf 'set location /work/postmark\\nset number {FILES}\\n\
         set transactions {transactions}\\nrun\\nquit\\n' | postmark"
    );
    let output = shell.run(&line, LIMIT)?.expect_success(&line)?;
    let (created, deleted) = parse_files(&output.text)
        .with_context(|| format!("postmark printed no counts: {}", output.text))?;
    ensure!(
        created == deleted && created > FILES,
        "postmark created {created} files and deleted {deleted}: {}",
        output.text
    );
    aside(&mut shell, "rm -rf /work/postmark && sync")?;
    Ok(Sample::seconds(output.took))
}

/// Number of files that it created, and that it deleted.
fn parse_files(text: &str) -> Option<(u64, u64)> {
    let count = |what: &str| {
        let line = text.lines().find(|line| line.contains(what))?;
        line.split_whitespace().next()?.parse().ok()
    };
    Some((count(" created (")?, count(" deleted (")?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_counts_of_files_are_read() {
        let text = "\
Time:
\t6 seconds total
\t6 seconds of transactions (1666 per second)

Files:
\t5564 created (927 per second)
\t\tCreation alone: 500 files (500 per second)
\t\tMixed with transactions: 5064 files (844 per second)
\t4999 read (833 per second)
\t4967 appended (827 per second)
\t5564 deleted (927 per second)
\t\tDeletion alone: 628 files (628 per second)
";
        assert_eq!(parse_files(text), Some((5564, 5564)));
        assert_eq!(parse_files("Error: cannot open"), None);
    }
}
