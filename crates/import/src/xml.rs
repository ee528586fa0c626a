//! XML as a tree whose elements know their line.

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

/// More than any domain nests.
const MOST_DEPTH: usize = 64;

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) name: String,
    /// Line, from 1.
    pub(crate) line: usize,
    pub(crate) attributes: Vec<(String, String)>,
    pub(crate) children: Vec<Element>,
    /// Its own, without blanks around it.
    pub(crate) text: String,
}

impl Element {
    /// The value of an attribute; empty if there is none.
    pub(crate) fn get(&self, attribute: &str) -> &str {
        let found = self.attributes.iter().find(|(name, _)| name == attribute);
        found.map_or("", |(_, value)| value)
    }

    pub(crate) fn child(&self, name: &str) -> Option<&Element> {
        self.children.iter().find(|child| child.name == name)
    }

    /// The value of a child's attribute; empty if there is none.
    pub(crate) fn child_get(&self, name: &str, attribute: &str) -> &str {
        self.child(name).map_or("", |child| child.get(attribute))
    }

    /// The text of a child; empty if there is none.
    pub(crate) fn child_text(&self, name: &str) -> &str {
        self.child(name).map_or("", |child| &child.text)
    }

    /// Its attributes that are none of these, as they stand in the text.
    pub(crate) fn beside(&self, known: &[&str]) -> Vec<String> {
        let others = self.attributes.iter().filter(|(name, _)| !known.contains(&&**name));
        // What names a space says nothing by itself.
        let others = others.filter(|(name, _)| !name.starts_with("xmlns"));
        others.map(|(name, value)| format!("{name}='{value}'")).collect()
    }

    /// Text of its first tag.
    pub(crate) fn tag(&self) -> String {
        let attributes = self.attributes.iter().map(|(name, value)| format!(" {name}='{value}'"));
        format!("<{}{}>", self.name, attributes.collect::<String>())
    }
}

/// The root of a document, or the line and the reason why it has none.
pub(crate) fn parse(text: &str) -> Result<Element, (usize, String)> {
    let mut reader = Reader::from_str(text);
    let mut open: Vec<Element> = Vec::new();
    loop {
        let line =
            |at: u64| 1 + text.bytes().take(at as usize).filter(|&byte| byte == b'\n').count();
        let fail = |at: u64, error: &dyn std::fmt::Display| Err((line(at), error.to_string()));
        let event = reader.read_event();
        let at = reader.buffer_position();
        let closed = match event {
            Err(error) => return fail(reader.error_position(), &error),
            Ok(Event::Eof) if open.is_empty() => return fail(at, &"there is no element"),
            Ok(Event::Eof) => return fail(at, &"it ends in the midst of an element"),
            Ok(Event::Start(tag)) => {
                if open.len() == MOST_DEPTH {
                    return fail(at, &"elements are nested too deep");
                }
                open.push(element(&tag, line(at)).map_err(|error| (line(at), error))?);
                None
            }
            Ok(Event::Empty(tag)) => {
                Some(element(&tag, line(at)).map_err(|error| (line(at), error))?)
            }
            Ok(Event::End(_)) => open.pop(),
            Ok(Event::Text(piece)) => {
                let piece = piece.decode().map_err(|error| (line(at), error.to_string()))?;
                if let Some(element) = open.last_mut() {
                    element.text += &piece;
                }
                None
            }
            Ok(Event::GeneralRef(name)) => {
                let name = name.decode().map_err(|error| (line(at), error.to_string()))?;
                let meant = quick_xml::escape::resolve_predefined_entity(&name);
                match (open.last_mut(), meant) {
                    (Some(element), Some(meant)) => element.text += meant,
                    (_, None) => return fail(at, &format!("the entity &{name}; is not known")),
                    (None, _) => {}
                }
                None
            }
            Ok(_) => None,
        };
        if let Some(mut element) = closed {
            element.text = element.text.trim().to_owned();
            match open.last_mut() {
                Some(parent) => parent.children.push(element),
                None => return Ok(element),
            }
        }
    }
}

fn element(tag: &BytesStart<'_>, line: usize) -> Result<Element, String> {
    let mut attributes = Vec::new();
    for attribute in tag.attributes() {
        let attribute = attribute.map_err(|error| error.to_string())?;
        let name = String::from_utf8_lossy(attribute.key.as_ref()).into_owned();
        let raw = std::str::from_utf8(&attribute.value).map_err(|error| error.to_string())?;
        let value = quick_xml::escape::unescape(raw).map_err(|error| error.to_string())?;
        attributes.push((name, value.into_owned()));
    }
    let name = String::from_utf8_lossy(tag.name().as_ref()).into_owned();
    Ok(Element { name, line, attributes, ..Element::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_know_their_line_and_their_content() {
        let root =
            parse("<a>\n  <b x='1' y=\"&lt;\"/>\n <!-- c -->\n  <d>one &amp; two</d></a>").unwrap();
        assert_eq!((root.child_get("b", "x"), root.child_get("b", "y")), ("1", "<"));
        assert_eq!(root.child("b").unwrap().line, 2);
        assert_eq!((root.child_text("d"), root.child("d").unwrap().line), ("one & two", 4));
        assert_eq!(root.child("b").unwrap().tag(), "<b x='1' y='<'>");
    }

    #[test]
    fn what_is_no_document_is_refused_with_its_line() {
        for (text, line) in
            [("", 1), ("<a>\n<b>", 2), ("<a>\n</b>", 2), ("<a>\n&nbsp;</a>", 2), ("<a x=1/>", 1)]
        {
            assert_eq!(parse(text).unwrap_err().0, line, "{text}");
        }
        assert!(parse(&"<a>".repeat(100)).unwrap_err().1.contains("too deep"));
    }
}
