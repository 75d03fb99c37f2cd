//! `cobox config`: the brokers this user knows, the one that commands use, and the source of each setting.

use std::path::{Path, PathBuf};

use cobox_client::{Client, SessionFilter, check_url};
use cobox_protocol::ErrorCode;
use serde_json::{Value, json};

use super::Outcome;
use crate::{
    context::{self, BrokerSelection, Context, KeySource, Sourced},
    contexts::{self, ContextEntry, Contexts, KeyLocation, LOCAL},
    credentials::{self, KeyFileOrigin, KeyStore},
    failure::Failure,
    key_prompt,
    keyring::Account,
    target::Target,
};

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
A context names a broker, its API key and optionally a certificate authority. `cobox up` creates the context `local`.
Precedence, highest first: flags, the context named by --context, environment variables, the current context.

Examples:
  cobox config add prod --url https://cobox.example.com     prompts for the key
  pass cobox/prod | cobox config add prod --url https://cobox.example.com
  cobox config use prod
  cobox --context local session list
  cobox config show")]
pub enum ConfigCommand {
    /// Show every client setting and its source
    Show,
    /// List contexts
    Contexts,
    /// Set the current context
    Use {
        /// A context listed by `cobox config contexts`
        name: String,
    },
    /// Add or replace a context; the API key is read from standard input or a prompt
    Add(AddContextArgs),
    /// Remove a context and its stored key
    Remove {
        /// A context listed by `cobox config contexts`
        name: String,
    },
    /// Print the path of the config file
    Path,
}

#[derive(Debug, clap::Args)]
pub struct AddContextArgs {
    /// Name of the context
    #[arg(value_parser = contexts::parse_name)]
    name: String,
    // Separate from the global options of the same names: those choose the broker to use, these describe a broker to
    // save.
    /// The broker's URL
    #[arg(id = "url", long = "url", value_name = "URL")]
    url: Option<String>,
    /// Use the key in this file instead of storing a copy
    #[arg(id = "api_key_file", long = "api-key-file", value_name = "FILE", conflicts_with = "store")]
    api_key_file: Option<PathBuf>,
    /// PEM file of certificate authorities to trust in addition to the system's
    #[arg(id = "ca_file", long = "ca-file", value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// Where to store the key [default: the keyring if available, otherwise a file]
    #[arg(long, value_enum)]
    store: Option<KeyStore>,
    /// Add the context without checking the key at the broker
    #[arg(long)]
    no_check: bool,
}

pub async fn run(command: ConfigCommand, context: &Context) -> Outcome {
    let path = context::config_path(&|name| std::env::var_os(name)).ok_or_else(|| {
        Failure::new("no config file: neither XDG_CONFIG_HOME nor HOME is set")
            .with_advice("set COBOX_CONFIG to the path of the config file")
    })?;
    match command {
        ConfigCommand::Show => show(context)?,
        ConfigCommand::Contexts => list(context, &path)?,
        ConfigCommand::Use { name } => {
            let url = Contexts::update(&path, |contexts| {
                contexts.select(&name)?;
                Ok(contexts.get(&name)?.url.clone())
            })?;
            context.printer.result(&json!({"current": name, "url": url}), || format!("switched to context {name} ({url})"))?;
        }
        ConfigCommand::Add(add) => return self::add(add, &path, context).await,
        ConfigCommand::Remove { name } => remove(&name, &path, context)?,
        ConfigCommand::Path => context.printer.result(&json!({"path": path, "exists": path.exists()}), || path.display().to_string())?,
    }
    Ok(0)
}

async fn add(args: AddContextArgs, path: &Path, context: &Context) -> Outcome {
    if args.name == LOCAL {
        return Err(Failure::new("the context name `local` is reserved for `cobox up`").with_advice("choose another name"));
    }
    let url = args.url.ok_or_else(|| Failure::new("--url is missing").with_advice("pass the broker's URL with --url"))?;
    check_url(&url)?;
    let ca_file = args.ca_file.as_deref().map(absolute_path).transpose()?;
    let account = Account { context: args.name.clone(), url: url.clone() };
    let (key, named_location) = match &args.api_key_file {
        Some(file) => {
            let file = absolute_path(file)?;
            let stored = credentials::read_file(&file, KeyFileOrigin::Config)?;
            if let Some(warning) = stored.warning {
                context.printer.note(&warning);
            }
            (stored.key, Some(KeyLocation::File(file)))
        }
        None => (key_prompt::read_key(context.printer, &format!("API key for {url}"))?, None),
    };
    if !args.no_check {
        let client = match &ca_file {
            None => Client::new(&url, key.clone())?,
            Some(file) => Client::trusting(&url, key.clone(), &context::read_ca(file)?)?,
        };
        check_key(&client, context).await?;
    }
    // The previous entry of this name: its own key, if it has one, must be removed as well.
    let previous = Contexts::read(path)?.find(&args.name).cloned();
    let (location, keyring_refusal) = match named_location {
        Some(location) => (location, None),
        None => credentials::store_key(&account, path, &key, args.store)?,
    };
    let entry = ContextEntry { url: url.clone(), key: location.clone(), ca_file };
    let is_current = Contexts::update(path, |contexts| {
        // A further context doesn't change which broker commands use, unless there was none.
        let current = contexts.current().unwrap_or(&args.name).to_owned();
        contexts.insert(&args.name, entry);
        if contexts.current() != Some(&current) {
            contexts.select(&current)?;
        }
        Ok(current == args.name)
    })?;
    if let Some(previous) =
        previous.filter(|previous| previous.key != location || (previous.key == KeyLocation::Keyring && previous.url != url))
    {
        let old = Account { context: args.name.clone(), url: previous.url };
        if let Err(failure) = credentials::delete_key(&old, path, &previous.key) {
            context.printer.note(&format!("note: {}", failure.message));
        }
    }
    if let Some(reason) = keyring_refusal {
        context
            .printer
            .note(&format!("note: stored the key in a file that only you can read, because the keyring is not available: {reason}"));
    }
    let output =
        json!({"name": args.name, "url": url, "key": location_name(&location), "key_file": key_file(&location), "current": is_current});
    context.printer.result(&output, || {
        let next = if is_current { String::new() } else { format!("; switch to it with `cobox config use {}`", args.name) };
        format!("added context {} ({url}); key stored in {}{next}", args.name, describe_location(&location))
    })?;
    Ok(0)
}

/// A refused key is not saved. A key is saved unchecked if the broker is unreachable, because it may be reachable
/// later.
async fn check_key(client: &Client, context: &Context) -> Result<(), Failure> {
    let filter = SessionFilter { limit: Some(1), ..SessionFilter::default() };
    match client.list_sessions(&filter).await {
        Ok(_) => Ok(()),
        Err(e) if e.is(ErrorCode::Unauthenticated) => {
            Err(Failure::from(e).with_advice("check the key, or add the context unchecked with --no-check"))
        }
        Err(e) if e.is_retryable() => {
            context.printer.note(&format!("note: could not check the key: {e}"));
            Ok(())
        }
        Err(e) => Err(Failure::from(e).with_advice("check the URL, or add the context unchecked with --no-check")),
    }
}

fn remove(name: &str, path: &Path, context: &Context) -> Result<(), Failure> {
    let entry = Contexts::update(path, |contexts| contexts.remove(name))?;
    // After the context: an orphaned key has no effect, but a context without its key would cause confusing errors.
    let deleted = credentials::delete_key(&Account { context: name.to_owned(), url: entry.url.clone() }, path, &entry.key);
    if let Err(failure) = deleted {
        context.printer.note(&format!("note: {}", failure.message));
    }
    context.printer.result(&json!({"name": name, "removed": true}), || format!("removed {name}"))?;
    Ok(())
}

fn list(context: &Context, path: &Path) -> Result<(), Failure> {
    let contexts = Contexts::read(path)?;
    let current = contexts.current();
    let items: Vec<Value> = contexts
        .iter()
        .map(|(name, entry)| {
            json!({"name": name, "url": entry.url, "current": Some(name) == current, "key": location_name(&entry.key),
                "key_file": key_file(&entry.key), "ca_file": entry.ca_file})
        })
        .collect();
    let row = |(name, entry): (&str, &ContextEntry)| {
        let mark = if Some(name) == current { "*" } else { "" };
        vec![mark.to_owned(), name.to_owned(), entry.url.clone(), describe_location(&entry.key)]
    };
    let rows: Vec<_> = contexts.iter().map(row).collect();
    let empty = "no contexts; create one with `cobox up` or `cobox config add NAME --url URL`";
    context.printer.list(&json!({ "items": items }), &["", "CONTEXT", "URL", "KEY"], &rows, empty)?;
    Ok(())
}

fn show(context: &Context) -> Result<(), Failure> {
    let env: context::Environment = &|name| std::env::var_os(name);
    let BrokerSelection { config_path, context: selected_context, url, key, key_belongs_to, ca_file } =
        context::select_broker(&context.flags, env)?;
    let mut rows: Vec<(&str, Option<String>, String)> = Vec::new();
    let config_source = if env("COBOX_CONFIG").is_some_and(|v| !v.is_empty()) { "COBOX_CONFIG" } else { "default" };
    rows.push(("config file", config_path.map(|p| p.display().to_string()), config_source.to_owned()));
    let mut add = |name, sourced: Option<Sourced<String>>, default_source: &str| {
        let (value, source) = sourced.map_or((None, default_source.to_owned()), |sourced| (Some(sourced.value), sourced.source));
        rows.push((name, value, source));
    };
    add("context", selected_context, "none selected");
    add("url", url, "not set");
    let no_key = key_belongs_to.map_or_else(|| "not set".to_owned(), |url| format!("not set; the context's key is for {url}"));
    // Shows where the key is stored, never the key itself.
    let describe = |source: &KeySource| match source {
        KeySource::Variable(_) => "(hidden)".to_owned(),
        KeySource::File(path) => path.display().to_string(),
        KeySource::Context(_, location) => describe_location(location),
    };
    add("api key", key.map(|sourced| Sourced { value: describe(&sourced.value), source: sourced.source }), &no_key);
    add("ca file", ca_file.map(|sourced| Sourced { value: sourced.value.display().to_string(), source: sourced.source }), "not set");
    let thread_source = if env("COBOX_THREAD").is_some_and(|v| !v.is_empty()) { "COBOX_THREAD" } else { "default" };
    add("thread", Some(Sourced { value: Target::default_thread(env).name().to_owned(), source: thread_source.to_owned() }), "");
    let data_dir = context::default_data_dir(env).map(|dir| Sourced { value: dir.display().to_string(), source: "default".to_owned() });
    add("data directory", data_dir, "there is no home directory");
    let values: Vec<Value> =
        rows.iter().map(|(name, value, source)| json!({"name": name.replace(' ', "_"), "value": value, "from": source})).collect();
    context.printer.result(&json!({ "values": values }), || {
        let dash = || "-".to_owned();
        let cells: Vec<_> =
            rows.iter().map(|(name, value, source)| vec![(*name).to_owned(), value.clone().unwrap_or_else(dash), source.clone()]).collect();
        context.printer.table(&["SETTING", "VALUE", "FROM"], &cells)
    })?;
    Ok(())
}

/// Absolute, because a context is used from any directory.
fn absolute_path(path: &Path) -> Result<PathBuf, Failure> {
    path.canonicalize().map_err(|e| Failure::new(format!("{}: {e}", path.display())))
}

fn describe_location(location: &KeyLocation) -> String {
    match location {
        KeyLocation::File(path) => path.display().to_string(),
        KeyLocation::Keyring => "the keyring".to_owned(),
    }
}

const fn location_name(location: &KeyLocation) -> &'static str {
    match location {
        KeyLocation::File(_) => "file",
        KeyLocation::Keyring => "keyring",
    }
}

fn key_file(location: &KeyLocation) -> Option<&Path> {
    match location {
        KeyLocation::File(path) => Some(path),
        KeyLocation::Keyring => None,
    }
}
