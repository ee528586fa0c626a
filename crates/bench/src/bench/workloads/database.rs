//! SQLite in the guest: a bank's transactions, as TPC-B and pgbench have them. Each changes an
//! account, a teller and a branch, reads the balance, writes history, and is on the disk
//! before the next one begins.

use super::{Bed, Sample, Scale, aside};
use anyhow::{Result, ensure};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(600);
const TRANSACTIONS: (u32, u32) = (4_000, 1_000);
const ACCOUNTS: u32 = 50_000;
const TELLERS: u32 = 10;
/// Directory where it happens.
const FOLDER: &str = "/work/bank";
/// Commits go to the write-ahead log, each with a flush of the disk.
const PRAGMAS: &str = "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL;";

pub fn run(bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
    let transactions = scale.of(TRANSACTIONS.0, TRANSACTIONS.1);
    let mut shell = bed.shell()?;
    aside(&mut shell, &format!("rm -rf {FOLDER} && mkdir -p {FOLDER}"))?;
    aside(&mut shell, &format!("sqlite3 {FOLDER}/bank \"{PRAGMAS} {}\"", schema()))?;
    aside(&mut shell, &format!("{} && sync", script(transactions)))?;
    let line = format!("sqlite3 {FOLDER}/bank < {FOLDER}/script > /dev/null");
    let output = shell.run(&line, LIMIT)?.expect_success(&line)?;
    let books = aside(&mut shell, &format!("sqlite3 {FOLDER}/bank \"{BALANCE}\""))?.text;
    ensure!(
        books.trim() == format!("{transactions}|1"),
        "the bank's books do not balance after {transactions} transactions: {books}"
    );
    aside(&mut shell, &format!("rm -rf {FOLDER} && sync"))?;
    Ok(Sample::seconds(output.took))
}

fn schema() -> String {
    let numbers = |most| {
        format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {most}) \
             SELECT i, 0 FROM n"
        )
    };
    format!(
        "CREATE TABLE accounts(id INTEGER PRIMARY KEY, balance INT); \
         CREATE TABLE tellers(id INTEGER PRIMARY KEY, balance INT); \
         CREATE TABLE branches(id INTEGER PRIMARY KEY, balance INT); \
         CREATE TABLE history(teller INT, branch INT, account INT, delta INT); \
         INSERT INTO accounts {}; INSERT INTO tellers {}; INSERT INTO branches VALUES (1, 0);",
        numbers(ACCOUNTS),
        numbers(TELLERS),
    )
}

/// Shell that writes the transactions, the same every time.
fn script(transactions: u32) -> String {
    let change = |table: &str, id: &str| {
        format!("printf \"UPDATE {table} SET balance = balance + %d WHERE id = %d;\\n\", d, {id};")
    };
    format!(
        "awk 'BEGIN {{ srand(1); print \"{PRAGMAS}\"; for (n = 0; n < {transactions}; n++) {{ \
         a = 1 + int(rand() * {ACCOUNTS}); t = 1 + int(rand() * {TELLERS}); \
         d = int(rand() * 10000) - 5000; print \"BEGIN;\"; {} \
         printf \"SELECT balance FROM accounts WHERE id = %d;\\n\", a; {} {} \
         printf \"INSERT INTO history VALUES (%d, 1, %d, %d);\\nCOMMIT;\\n\", t, a, d }} }}' \
         > {FOLDER}/script",
        change("accounts", "a"),
        change("tellers", "t"),
        change("branches", "1"),
    )
}

/// Query for how many transactions there were, and whether all sums are the same.
const BALANCE: &str = "SELECT (SELECT count(*) FROM history), \
                       (SELECT sum(delta) FROM history) = (SELECT sum(balance) FROM accounts) \
                       AND (SELECT sum(balance) FROM tellers) = (SELECT sum(balance) FROM accounts) \
                       AND (SELECT sum(balance) FROM branches) = (SELECT sum(balance) FROM accounts);";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lines_fit_a_console_and_its_quotes() {
        let script = script(TRANSACTIONS.0);
        assert_eq!(script.matches('\'').count(), 2, "{script}");
        for line in [&schema(), BALANCE, PRAGMAS] {
            assert!(!line.contains(['"', '\'', '$', '`', '\n']), "{line}");
        }
        assert!(schema().len() + script.len() < 3000);
    }
}
