//! The description of the API for machines, OpenAPI 3.1, made of the list of calls and of the types themselves.

use super::calls::{Call, all};
use axum::response::Json;
use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde_json::{Map, Value, json};
use std::borrow::Cow;
use understudy_client::ErrorBody;
use understudy_report::HostError;

const INTRODUCTION: &str = "The API of one host's daemon. On its unix socket, whoever may open that may do all. Over the network \
([api] of the host's configuration) it takes TLS and a role: each call says which. An error is {\"error\": {\"kind\", \
\"message\"}}; its message says what is wrong, and what to do.";

/// The description itself, as a body.
pub(super) struct Document;

impl JsonSchema for Document {
    fn schema_name() -> Cow<'static, str> {
        "OpenApi".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "object", "description": "An OpenAPI 3.1 document" })
    }
}

pub(super) async fn answer() -> Json<Value> {
    Json(document())
}

/// The whole description.
pub(super) fn document() -> Value {
    let settings = SchemaSettings::draft2020_12().with(|settings| {
        settings.definitions_path = "/components/schemas".into();
    });
    let mut generator = settings.into_generator();
    let mut paths = Map::new();
    let error = generator.subschema_for::<ErrorBody<HostError>>();
    for call in all() {
        let described = describe(&call, &mut generator);
        let path = paths.entry(call.path).or_insert_with(|| json!({}));
        path[call.method] = described;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Understudy",
            "version": env!("CARGO_PKG_VERSION"),
            "description": INTRODUCTION,
            "license": { "name": "Apache-2.0", "identifier": "Apache-2.0" }
        },
        "paths": paths,
        "components": {
            "schemas": generator.take_definitions(true),
            "securitySchemes": {
                "token": { "type": "http", "scheme": "bearer" },
                "certificate": { "type": "mutualTLS" }
            },
            "responses": {
                "error": {
                    "description": "What is wrong, and what to do",
                    "content": { "application/json": { "schema": error } }
                }
            }
        }
    })
}

fn describe(call: &Call, generator: &mut SchemaGenerator) -> Value {
    let mut parameters = names(call.path);
    if let Some(query) = call.query {
        parameters.extend(parameters_of(query(generator)));
    }
    let mut answers = Map::new();
    for answer in &call.answers {
        let mut described = json!({ "description": said(answer.status) });
        if answer.status != 204 {
            let schema = answer
                .schema
                .map_or_else(|| json!({ "type": "string" }), |schema| schema(generator).to_value());
            described["content"] = json!({ answer.media: { "schema": schema } });
        }
        answers.insert(answer.status.to_string(), described);
    }
    answers.insert("default".to_owned(), json!({ "$ref": "#/components/responses/error" }));
    let mut described = json!({
        "summary": call.summary,
        "operationId": operation(call),
        "description": format!("Takes the role {}.", call.access),
        "security": [{ "token": [] }, { "certificate": [] }],
        "x-role": call.access,
        "responses": answers,
    });
    if !parameters.is_empty() {
        described["parameters"] = parameters.into();
    }
    if let Some(takes) = call.takes {
        let schema = takes(generator).to_value();
        described["requestBody"] =
            json!({ "required": true, "content": { "application/json": { "schema": schema } } });
    }
    described
}

/// The names in braces in a path.
fn names(path: &str) -> Vec<Value> {
    let parts = path.split('/').filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'));
    let parameter = |name: &str| {
        let kind = if name == "id" { "integer" } else { "string" };
        json!({ "name": name, "in": "path", "required": true, "schema": { "type": kind } })
    };
    parts.map(parameter).collect()
}

/// The fields of what a query is read into.
fn parameters_of(query: Schema) -> Vec<Value> {
    let query = query.to_value();
    let required = query["required"].as_array().cloned().unwrap_or_default();
    let fields = query["properties"].as_object().cloned().unwrap_or_default();
    let parameter = |(name, mut schema): (String, Value)| {
        let about = schema.as_object_mut().and_then(|schema| schema.remove("description"));
        let required = required.contains(&Value::from(name.clone()));
        json!({
            "name": name, "in": "query", "required": required, "description": about,
            "schema": schema,
        })
    };
    fields.into_iter().map(parameter).collect()
}

/// A name for the call that programs can use: `get-v1-vms-name` and the like.
fn operation(call: &Call) -> String {
    let path = call.path.replace(['{', '}'], "").replace(['/', '.'], "-");
    format!("{}{path}", call.method)
}

fn said(status: u16) -> &'static str {
    match status {
        202 => "A job, with ?wait=false",
        204 => "Done",
        _ => "What came of it",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::path::Path;

    /// `UNDERSTUDY_WRITE=1` in the environment writes it anew.
    #[test]
    fn the_description_in_docs_is_that_of_this_code() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
        let now = serde_json::to_string_pretty(&document()).unwrap() + "\n";
        if std::env::var_os("UNDERSTUDY_WRITE").is_some() {
            std::fs::write(&path, &now).unwrap();
        }
        let written = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(written == now, "run this test with UNDERSTUDY_WRITE=1, and commit what it writes");
    }

    fn references(value: &Value, into: &mut BTreeSet<String>) {
        match value {
            Value::Object(fields) => {
                if let Some(Value::String(target)) = fields.get("$ref") {
                    into.insert(target.clone());
                }
                fields.values().for_each(|value| references(value, into));
            }
            Value::Array(items) => items.iter().for_each(|value| references(value, into)),
            _ => {}
        }
    }

    #[test]
    fn every_reference_leads_somewhere_and_every_call_has_its_name() {
        let document = document();
        let mut targets = BTreeSet::new();
        references(&document, &mut targets);
        assert!(targets.len() > 20, "{targets:?}");
        for target in targets {
            let place = target.strip_prefix('#').unwrap();
            assert!(document.pointer(place).is_some(), "{target} leads nowhere");
        }
        let names: Vec<String> = all().iter().map(operation).collect();
        let distinct: BTreeSet<&String> = names.iter().collect();
        assert_eq!(distinct.len(), names.len());
    }
}
