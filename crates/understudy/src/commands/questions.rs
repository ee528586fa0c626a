//! Questions to whoever sits at the terminal; nobody is asked where nobody sits.

use std::fmt::Display;
use std::io::{self, BufRead, IsTerminal, Write};
use std::str::FromStr;
use understudy_client::{Failure, FailureKind};

/// Asks, or does without.
pub struct Questions {
    interactive: bool,
}

impl Questions {
    /// Asks if there is a terminal, and its user does not want JSON.
    pub fn of_terminal(json: bool) -> Questions {
        Questions { interactive: !json && io::stdin().is_terminal() && io::stderr().is_terminal() }
    }

    /// The answer to a question; the default without one. `flag` gives the same.
    pub fn ask<T: FromStr + Display>(
        &self,
        question: &str,
        default: Option<T>,
        flag: &str,
    ) -> Result<T, Failure>
    where
        T::Err: Display,
    {
        if !self.interactive {
            let missing = || usage(format!("say with {flag} what nobody can be asked: {question}"));
            return default.ok_or_else(missing);
        }
        ask(&mut io::stdin().lock(), &mut io::stderr(), question, default, flag)
    }
}

fn ask<T: FromStr + Display>(
    answers: &mut impl BufRead,
    screen: &mut impl Write,
    question: &str,
    default: Option<T>,
    flag: &str,
) -> Result<T, Failure>
where
    T::Err: Display,
{
    let shown = default.as_ref().map(|default| format!(" [{default}]")).unwrap_or_default();
    loop {
        let mut answer = String::new();
        let read = write!(screen, "{question}{shown}: ")
            .and_then(|()| screen.flush())
            .and_then(|()| answers.read_line(&mut answer));
        if read.map_err(|error| usage(format!("{question}: {error}")))? == 0 {
            return Err(usage(format!("no answer; {flag} gives it as well: {question}")));
        }
        match (answer.trim(), &default) {
            ("", Some(_)) => break,
            (text, _) => match text.parse() {
                Ok(answer) => return Ok(answer),
                // A terminal that is gone shows with the next question.
                Err(error) => drop(writeln!(screen, "{error}")),
            },
        }
    }
    default.ok_or_else(|| usage(format!("no answer: {question}")))
}

fn usage(message: String) -> Failure {
    Failure::new(FailureKind::Usage, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::HostName;

    fn answer(text: &str, default: Option<&str>) -> (Result<HostName, Failure>, String) {
        let (mut answers, mut screen) = (text.as_bytes(), Vec::new());
        let default = default.map(|name| name.parse().unwrap());
        let answer = ask(&mut answers, &mut screen, "name", default, "--name");
        (answer, String::from_utf8(screen).unwrap())
    }

    #[test]
    fn a_wrong_answer_is_explained_and_asked_for_again() {
        let (name, screen) = answer("a b\nc\n", None);
        assert_eq!(name.unwrap(), "c");
        assert!(screen.starts_with("name: ") && screen.contains("letters"), "{screen}");
    }

    #[test]
    fn an_empty_answer_is_the_default() {
        let (name, screen) = answer("\n", Some("host-a"));
        assert_eq!((&*name.unwrap(), &*screen), ("host-a", "name [host-a]: "));
    }

    #[test]
    fn nobody_who_answers_is_told_of_the_flag() {
        assert!(answer("", Some("host-a")).0.unwrap_err().message.contains("--name"));
        let alone = Questions { interactive: false };
        let missing = alone.ask::<HostName>("name", None, "--name").unwrap_err();
        assert!(missing.message.contains("--name"), "{}", missing.message);
        let taken = alone.ask("name", Some("a".parse::<HostName>().unwrap()), "--name");
        assert_eq!(taken.unwrap(), "a");
    }
}
