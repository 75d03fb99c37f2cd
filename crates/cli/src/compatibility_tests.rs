//! Flags and settings that scripts and configuration files depend on. A snapshot changes only by a deliberate
//! addition.

use std::fmt::Write as _;

use crate::{broker_settings, help_tests::commands};

/// Tables of the settings file; the empty name is the top level.
const TABLES: [&str; 14] = [
    "",
    "body_limits",
    "cors",
    "gateway_limits",
    "metrics",
    "oidc",
    "rate_limits",
    "templates.t",
    "templates.t.resources",
    "thread_authority",
    "tls",
    "local",
    "local.dataplane",
    "local.most",
];

fn check(name: &str, text: &str) {
    let mut settings = insta::Settings::clone_current();
    settings.set_snapshot_path("../tests/frozen");
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| insta::assert_snapshot!(name, text.trim_end()));
}

#[test]
fn commands_keep_their_arguments() {
    let mut lines = String::new();
    for (name, command) in commands() {
        for arg in command.get_arguments().filter(|arg| !arg.is_global_set() || name.is_empty()) {
            write!(lines, "cobox {name}:").unwrap();
            for short in arg.get_short_and_visible_aliases().unwrap_or_default() {
                write!(lines, " -{short}").unwrap();
            }
            for long in arg.get_long_and_visible_aliases().unwrap_or_default() {
                write!(lines, " --{long}").unwrap();
            }
            for value in arg.get_value_names().unwrap_or_default() {
                write!(lines, " {value}").unwrap();
            }
            let values: Vec<_> = arg.get_possible_values().iter().map(|v| v.get_name().to_owned()).collect();
            if !values.is_empty() && arg.get_action().takes_values() {
                write!(lines, " = {}", values.join("|")).unwrap();
            }
            if let Some(variable) = arg.get_env() {
                write!(lines, " ${}", variable.to_string_lossy()).unwrap();
            }
            lines.push('\n');
        }
    }
    check("arguments", &lines);
}

/// The parser lists every key of a table when it finds an unknown one.
#[test]
fn the_settings_file_keeps_its_keys() {
    let mut lines = String::new();
    for table in TABLES {
        let header = if table.is_empty() { String::new() } else { format!("[{table}]\n") };
        let error = broker_settings::parse(&format!("{header}no_such_key = 1\n")).map(drop).unwrap_err();
        let (_, keys) = error.split_once("expected ").unwrap_or_else(|| panic!("[{table}]: {error}"));
        let mut keys: Vec<_> = keys.split('`').skip(1).step_by(2).collect();
        keys.sort_unstable();
        for key in keys {
            writeln!(lines, "[{table}] {key}").unwrap();
        }
    }
    check("settings", &lines);
}
