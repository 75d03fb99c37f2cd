//! `cobox config`: the brokers this user knows, the one that commands use, and the source of each setting.

use std::path::{Path, PathBuf};

use cobox_client::{Client, SessionFilter, check_url};
use cobox_protocol::ErrorCode;
use serde_json::{Value, json};

use super::Outcome;
use crate::{
    context::{self, Choice, Context, KeySource, Said},
    contexts::{self, Contexts, Entry, KeyPlace, LOCAL},
    credentials::{self, NamedBy, Store},
    failure::Failure,
    key_prompt,
    keyring::Account,
    target::Target,
};

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "\
A context is a broker, a key for it and maybe a certificate authority. `cobox up` writes the one called `local`.
Flags win over the environment, the environment over the context; a context named by --context wins over the environment.

Examples:
  cobox config add prod --url https://cobox.example.com     asks for the key
  pass cobox/prod | cobox config add prod --url https://cobox.example.com
  cobox config use prod
  cobox --context local session list
  cobox config show")]
pub enum Command {
    /// Every setting of this command line, and where it came from
    Show,
    /// The contexts there are
    Contexts,
    /// Let commands go to this context from now on
    Use {
        /// One of those that `cobox config contexts` shows
        name: String,
    },
    /// Add a context, or replace it; the API key is read from standard input or asked for
    Add(Add),
    /// Forget a context and the key that was kept for it
    Remove {
        /// One of those that `cobox config contexts` shows
        name: String,
    },
    /// Where the config file is, whether it is there or not
    Path,
}

#[derive(Debug, clap::Args)]
pub struct Add {
    /// What to call it
    #[arg(value_parser = contexts::name)]
    name: String,
    // Separate from the global options of the same names: those choose the broker to use, these describe a broker to
    // save.
    /// The broker's URL
    #[arg(id = "url", long = "url", value_name = "URL")]
    url: Option<String>,
    /// Use the key in this file, where it is, instead of keeping one
    #[arg(id = "api_key_file", long = "api-key-file", value_name = "FILE", conflicts_with = "store")]
    api_key_file: Option<PathBuf>,
    /// A file with the certificates of authorities to trust beside the system's
    #[arg(id = "ca_file", long = "ca-file", value_name = "FILE")]
    ca_file: Option<PathBuf>,
    /// Where to keep the key [default: the keyring where there is one, else a file]
    #[arg(long, value_enum)]
    store: Option<Store>,
    /// Add it without asking the broker whether the key is good
    #[arg(long)]
    no_check: bool,
}

pub async fn run(command: Command, context: &Context) -> Outcome {
    let path = context::config_path(&|name| std::env::var_os(name)).ok_or_else(|| {
        Failure::new("there is no home directory to keep a config in").with_advice("set COBOX_CONFIG to where it should be")
    })?;
    match command {
        Command::Show => show(context)?,
        Command::Contexts => list(context, &path)?,
        Command::Use { name } => {
            let url = Contexts::change(&path, |contexts| {
                contexts.use_one(&name)?;
                Ok(contexts.get(&name)?.url.clone())
            })?;
            context.printer.result(&json!({"current": name, "url": url}), || format!("commands go to {name} at {url}"))?;
        }
        Command::Add(add) => return self::add(add, &path, context).await,
        Command::Remove { name } => remove(&name, &path, context)?,
        Command::Path => context.printer.result(&json!({"path": path, "exists": path.exists()}), || path.display().to_string())?,
    }
    Ok(0)
}

async fn add(args: Add, path: &Path, context: &Context) -> Outcome {
    if args.name == LOCAL {
        return Err(Failure::new("`local` is the broker that `cobox up` starts here").with_advice("choose another name"));
    }
    let url = args.url.ok_or_else(|| Failure::new("a context needs its broker's URL").with_advice("name it with --url"))?;
    check_url(&url)?;
    let ca_file = args.ca_file.as_deref().map(absolute).transpose()?;
    let account = Account { context: args.name.clone(), url: url.clone() };
    let (key, named) = match &args.api_key_file {
        Some(file) => {
            let file = absolute(file)?;
            let found = credentials::read_file(&file, NamedBy::Config)?;
            if let Some(note) = found.note {
                context.printer.note(&note);
            }
            (found.key, Some(KeyPlace::File(file)))
        }
        None => (key_prompt::read(context.printer, &format!("API key for {url}"))?, None),
    };
    if !args.no_check {
        let client = match &ca_file {
            None => Client::new(&url, key.clone())?,
            Some(file) => Client::trusting(&url, key.clone(), &context::read_ca(file)?)?,
        };
        check(&client, context).await?;
    }
    // The previous entry of this name: its own key, if it has one, must be removed as well.
    let before = Contexts::read(path)?.find(&args.name).cloned();
    let (place, why_not_keyring) = match named {
        Some(place) => (place, None),
        None => credentials::keep(&account, path, &key, args.store)?,
    };
    let entry = Entry { url: url.clone(), key: place.clone(), ca_file };
    let is_current = Contexts::change(path, |contexts| {
        // A further context doesn't change which broker commands use, unless there was none.
        let current = contexts.current().unwrap_or(&args.name).to_owned();
        contexts.put(&args.name, entry);
        if contexts.current() != Some(&current) {
            contexts.use_one(&current)?;
        }
        Ok(current == args.name)
    })?;
    if let Some(before) = before.filter(|before| before.key != place || (before.key == KeyPlace::Keyring && before.url != url)) {
        let old = Account { context: args.name.clone(), url: before.url };
        if let Err(failure) = credentials::forget(&old, path, &before.key) {
            context.printer.note(&format!("note: {}", failure.message));
        }
    }
    if let Some(why) = why_not_keyring {
        context.printer.note(&format!("note: the key is in a file that only you can read, not in a keyring: {why}"));
    }
    let told = json!({"name": args.name, "url": url, "key": place_word(&place), "key_file": key_file(&place), "current": is_current});
    context.printer.result(&told, || {
        let next = if is_current { String::new() } else { format!("; `cobox config use {}` lets commands go there", args.name) };
        format!("added {} at {url}, its key in {}{next}", args.name, place_words(&place))
    })?;
    Ok(0)
}

/// A refused key is not saved. A key is saved unchecked if the broker is unreachable, because it may be reachable
/// later.
async fn check(client: &Client, context: &Context) -> Result<(), Failure> {
    let filter = SessionFilter { limit: Some(1), ..SessionFilter::default() };
    match client.list_sessions(&filter).await {
        Ok(_) => Ok(()),
        Err(e) if e.is(ErrorCode::Unauthenticated) => {
            Err(Failure::from(e).with_advice("check the key; nothing was added (--no-check adds it all the same)"))
        }
        Err(e) if e.is_retryable() => {
            context.printer.note(&format!("note: the key was not checked: {e}"));
            Ok(())
        }
        Err(e) => Err(Failure::from(e).with_advice("is there a broker at this URL? --no-check adds it all the same")),
    }
}

fn remove(name: &str, path: &Path, context: &Context) -> Result<(), Failure> {
    let entry = Contexts::change(path, |contexts| contexts.remove(name))?;
    // After the context: an orphaned key has no effect, but a context without its key would cause confusing errors.
    let forgotten = credentials::forget(&Account { context: name.to_owned(), url: entry.url.clone() }, path, &entry.key);
    if let Err(failure) = forgotten {
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
            json!({"name": name, "url": entry.url, "current": Some(name) == current, "key": place_word(&entry.key),
                "key_file": key_file(&entry.key), "ca_file": entry.ca_file})
        })
        .collect();
    let row = |(name, entry): (&str, &Entry)| {
        let mark = if Some(name) == current { "*" } else { "" };
        vec![mark.to_owned(), name.to_owned(), entry.url.clone(), place_words(&entry.key)]
    };
    let rows: Vec<_> = contexts.iter().map(row).collect();
    let empty = "no contexts yet; `cobox up` makes one, and `cobox config add NAME --url URL`";
    context.printer.list(&json!({ "items": items }), &["", "CONTEXT", "URL", "KEY"], &rows, empty)?;
    Ok(())
}

fn show(context: &Context) -> Result<(), Failure> {
    let env: context::Environment = &|name| std::env::var_os(name);
    let Choice { config_path, context: chosen, url, key, withheld_from, ca_file } = context::choose(&context.flags, env)?;
    let mut rows: Vec<(&str, Option<String>, String)> = Vec::new();
    let config_from = if env("COBOX_CONFIG").is_some_and(|v| !v.is_empty()) { "COBOX_CONFIG" } else { "default" };
    rows.push(("config file", config_path.map(|p| p.display().to_string()), config_from.to_owned()));
    let mut add = |name, said: Option<Said<String>>, otherwise: &str| {
        let (value, from) = said.map_or((None, otherwise.to_owned()), |said| (Some(said.value), said.from));
        rows.push((name, value, from));
    };
    add("context", chosen, "none chosen");
    add("url", url, "not set");
    let no_key = withheld_from.map_or_else(|| "not set".to_owned(), |url| format!("not set; the context's is for {url}"));
    // Shows where the key is stored, never the key itself.
    let words = |source: &KeySource| match source {
        KeySource::Given(_) => "(hidden)".to_owned(),
        KeySource::File(path) => path.display().to_string(),
        KeySource::Context(_, place) => place_words(place),
    };
    add("api key", key.map(|said| Said { value: words(&said.value), from: said.from }), &no_key);
    add("ca file", ca_file.map(|said| Said { value: said.value.display().to_string(), from: said.from }), "not set");
    let thread_from = if env("COBOX_THREAD").is_some_and(|v| !v.is_empty()) { "COBOX_THREAD" } else { "default" };
    add("thread", Some(Said { value: Target::default_thread(env).name().to_owned(), from: thread_from.to_owned() }), "");
    let data_dir = context::default_data_dir(env).map(|dir| Said { value: dir.display().to_string(), from: "default".to_owned() });
    add("data directory", data_dir, "there is no home directory");
    let values: Vec<Value> =
        rows.iter().map(|(name, value, from)| json!({"name": name.replace(' ', "_"), "value": value, "from": from})).collect();
    context.printer.result(&json!({ "values": values }), || {
        let dash = || "-".to_owned();
        let cells: Vec<_> =
            rows.iter().map(|(name, value, from)| vec![(*name).to_owned(), value.clone().unwrap_or_else(dash), from.clone()]).collect();
        context.printer.table(&["SETTING", "VALUE", "FROM"], &cells)
    })?;
    Ok(())
}

/// Absolute, because a context is used from any directory.
fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    path.canonicalize().map_err(|e| Failure::new(format!("{}: {e}", path.display())))
}

fn place_words(place: &KeyPlace) -> String {
    match place {
        KeyPlace::File(path) => path.display().to_string(),
        KeyPlace::Keyring => "the keyring".to_owned(),
    }
}

const fn place_word(place: &KeyPlace) -> &'static str {
    match place {
        KeyPlace::File(_) => "file",
        KeyPlace::Keyring => "keyring",
    }
}

fn key_file(place: &KeyPlace) -> Option<&Path> {
    match place {
        KeyPlace::File(path) => Some(path),
        KeyPlace::Keyring => None,
    }
}
