//! A laboratory on one machine: hosts as network namespaces, clients, watchers, failures
