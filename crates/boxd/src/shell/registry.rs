//! The shells of a sandbox, by name and id.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use cobox_protocol::{ApiError, ErrorCode, ShellId, control::DataplaneLimits, process::ProcessKind, shell::ShellCreate};
use cobox_token::Claims;
use parking_lot::{Mutex, MutexGuard};

use super::{
    shared_shell::Shell,
    task,
    terminal::{self, Terminal},
};
use crate::{
    processes::{Job, display_argv},
    server::Server,
};

/// Maximum length of a shell's name, which occurs in URLs and lists.
const MAX_NAME_CHARS: usize = 64;

/// Maximum number of ended shells kept. Each takes its ring buffer and its screen.
const MAX_ENDED: usize = 16;

pub struct Shells {
    by_name: Mutex<HashMap<String, Arc<Shell>>>,
    /// Recently ended shells, for clients that were disconnected and return for the last output and the exit code.
    ended: Mutex<VecDeque<Arc<Shell>>>,
    /// Held while a shell is created, so that two concurrent requests for a name get the same shell.
    creation: tokio::sync::Mutex<()>,
    limit: usize,
    ring_bytes: u64,
    /// Serves participants without control one after the other, so that they never all delay the controller.
    pub background_turn: tokio::sync::Semaphore,
}

impl Shells {
    pub fn new(limits: &DataplaneLimits) -> Self {
        Self {
            by_name: Mutex::default(),
            ended: Mutex::default(),
            creation: tokio::sync::Mutex::new(()),
            limit: limits.shells as usize,
            ring_bytes: limits.shell_ring_bytes,
            background_turn: tokio::sync::Semaphore::new(1),
        }
    }

    /// Finds a shell by name or id.
    pub fn find(&self, shell: &str) -> Result<Arc<Shell>, ApiError> {
        let shells = self.shells();
        let matching = shells.get(shell).or_else(|| shells.values().find(|s| s.id.as_str() == shell)).cloned();
        matching.ok_or_else(|| {
            let display_name: String = shell.escape_default().take(MAX_NAME_CHARS).collect();
            ApiError::new(ErrorCode::ShellNotFound, format!("no shell `{display_name}` in this sandbox; GET /v1/shells lists the shells"))
        })
    }

    /// Finds an ended shell by its epoch.
    pub fn find_ended(&self, epoch: &str) -> Option<Arc<Shell>> {
        self.ended().iter().find(|shell| shell.id.as_str() == epoch).cloned()
    }

    pub fn list(&self) -> Vec<Arc<Shell>> {
        let mut all: Vec<_> = self.shells().values().cloned().collect();
        all.sort_by(|a, b| a.id.cmp(&b.id));
        all
    }

    /// The shell of this name, and whether it was created.
    pub async fn find_or_create(&self, server: &Arc<Server>, create: ShellCreate, claims: &Claims) -> Result<(Arc<Shell>, bool), ApiError> {
        let _creation = self.creation.lock().await;
        if let Some(name) = &create.name
            && let Ok(shell) = self.find(name)
        {
            return Ok((shell, false));
        }
        Ok((self.start_shell(server, create, claims).await?, true))
    }

    /// Creates a shell. Fails if the name exists.
    pub async fn create(&self, server: &Arc<Server>, create: ShellCreate, claims: &Claims) -> Result<Arc<Shell>, ApiError> {
        let _creation = self.creation.lock().await;
        if let Some(name) = &create.name
            && self.find(name).is_ok()
        {
            return Err(ApiError::new(
                ErrorCode::ShellExists,
                format!("shell `{name}` already exists; connect to it, or choose another name"),
            ));
        }
        self.start_shell(server, create, claims).await
    }

    async fn start_shell(&self, server: &Arc<Server>, create: ShellCreate, claims: &Claims) -> Result<Arc<Shell>, ApiError> {
        let id = ShellId::new();
        let name = match &create.name {
            Some(name) => validate_name(name)?.to_owned(),
            None => id.to_string(),
        };
        if self.shells().len() >= self.limit {
            let message = format!("{} shells are already open, which is the limit; end one and try again", self.limit);
            return Err(ApiError::new(ErrorCode::RateLimited, message));
        }
        let size = terminal::size(create.cols, create.rows)?;
        let command = create.command.clone();
        let terminal = Terminal::start(server, create, size).await?;
        let argv: Vec<Vec<u8>> = terminal.argv.iter().map(|arg| arg.clone().into_bytes()).collect();
        let job = Job::new(id.to_string(), ProcessKind::Shell, display_argv(&argv), claims, terminal.program.clone());
        let listed = server.processes.list(Arc::new(job));
        let shell = Arc::new(Shell::new(name.clone(), id, command, terminal, listed, size, self.ring_bytes));
        self.shells().insert(name, shell.clone());
        tracing::info!(shell_id = %shell.id, name = shell.name, "shell started");
        server.tasks.spawn(task::run(server.clone(), shell.clone()));
        Ok(shell)
    }

    /// Moves an ended shell to the list of ended ones and frees its name.
    pub fn mark_ended(&self, shell: &Arc<Shell>) {
        let mut ended = self.ended();
        ended.push_back(shell.clone());
        while ended.len() > MAX_ENDED {
            ended.pop_front();
        }
        drop(ended);
        let mut shells = self.shells();
        if shells.get(&shell.name).is_some_and(|known| Arc::ptr_eq(known, shell)) {
            shells.remove(&shell.name);
        }
    }

    pub fn remove(&self, shell: &Arc<Shell>) {
        self.ended().retain(|known| !Arc::ptr_eq(known, shell));
    }

    fn ended(&self) -> MutexGuard<'_, VecDeque<Arc<Shell>>> {
        self.ended.lock()
    }

    fn shells(&self) -> MutexGuard<'_, HashMap<String, Arc<Shell>>> {
        self.by_name.lock()
    }
}

fn validate_name(name: &str) -> Result<&str, ApiError> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let is_valid = !name.is_empty() && name.len() <= MAX_NAME_CHARS && name.chars().all(is_plain) && name.parse::<ShellId>().is_err();
    let message = "a shell name must have 1 to 64 letters, digits, `.`, `_` or `-`, and must not look like an ID";
    if is_valid { Ok(name) } else { Err(ApiError::invalid(message)) }
}
