//! XML as a tree whose elements know their line.

use quick_xml::Reader;
use quick_xml::events::{BytesRef, BytesStart, Event};
use std::fmt::Display;
use std::ops::Range;

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
    let (mut line, mut counted) = (1, 0);
    loop {
        let event = reader.read_event();
        if event.is_err() {
            (line, counted) = (1, 0);
        }
        let at = event.as_ref().map_or(reader.error_position(), |_| reader.buffer_position());
        line += lines(text, counted..at as usize);
        counted = at as usize;
        let closed = take(event, &mut open, line).map_err(|why| (line, why))?;
        if let Some(mut element) = closed {
            element.text = element.text.trim().to_owned();
            match open.last_mut() {
                Some(parent) => parent.children.push(element),
                None => return Ok(element),
            }
        }
    }
}

fn lines(text: &str, range: Range<usize>) -> usize {
    let bytes = text.as_bytes().get(range).unwrap_or_default();
    bytes.iter().filter(|&&byte| byte == b'\n').count()
}

/// Takes what comes next in a document, of which these elements are open; the one that ends there.
fn take(
    event: Result<Event<'_>, quick_xml::Error>,
    open: &mut Vec<Element>,
    line: usize,
) -> Result<Option<Element>, String> {
    let words = |error: &dyn Display| error.to_string();
    let piece = match event.map_err(|error| words(&error))? {
        Event::Eof if open.is_empty() => return Err("there is no element".to_owned()),
        Event::Eof => return Err("it ends in the midst of an element".to_owned()),
        Event::Start(_) if open.len() == MOST_DEPTH => {
            return Err("elements are nested too deep".to_owned());
        }
        Event::Start(tag) => {
            open.push(element(&tag, line)?);
            return Ok(None);
        }
        Event::Empty(tag) => return element(&tag, line).map(Some),
        Event::End(_) => return Ok(open.pop()),
        Event::Text(piece) => piece.decode().map_err(|error| words(&error))?.into_owned(),
        Event::CData(piece) => piece.decode().map_err(|error| words(&error))?.into_owned(),
        Event::GeneralRef(name) => meant(&name)?,
        // What it defines might be meant anywhere.
        Event::DocType(_) => return Err("it has a document type, which is not read".to_owned()),
        Event::Comment(_) | Event::Decl(_) | Event::PI(_) => return Ok(None),
    };
    if let Some(element) = open.last_mut() {
        element.text += &piece;
    }
    Ok(None)
}

/// The text that a reference stands for: a character by its number, or one of the five that XML itself names.
fn meant(reference: &BytesRef<'_>) -> Result<String, String> {
    if let Some(meant) = reference.resolve_char_ref().map_err(|error| error.to_string())? {
        return Ok(meant.to_string());
    }
    let name = reference.decode().map_err(|error| error.to_string())?;
    let meant = quick_xml::escape::resolve_predefined_entity(&name);
    meant.map(str::to_owned).ok_or_else(|| format!("the entity &{name}; is not known"))
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

    /// The text was passed over without a word: a kernel's command line, say.
    #[test]
    fn text_counts_however_it_is_written() {
        let root =
            parse("<a><b><![CDATA[root=/dev/vda1 <ro>]]></b><c>1&#13;&#x32;</c></a>").unwrap();
        assert_eq!((root.child_text("b"), root.child_text("c")), ("root=/dev/vda1 <ro>", "1\r2"));
        let why = parse("<?xml version='1.0'?>\n<!DOCTYPE a [<!ENTITY b 'c'>]>\n<a/>").unwrap_err();
        assert_eq!(why, (2, "it has a document type, which is not read".to_owned()));
        assert!(parse("<a>&#0;</a>").is_err());
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
