//! API keys in the system's keyring: the Secret Service that desktops offer over D-Bus.

use std::{collections::HashMap, time::Duration};

use cobox_protocol::Secret;
use secret_service::{EncryptionType, Error, SecretService};

/// Time limit for one operation, including the user's entry of the password for a locked keyring.
const OPERATION_TIMEOUT: Duration = Duration::from_secs(60);
/// Time limit to connect: a bus without the service reports that in milliseconds, one that hangs never does.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
const APPLICATION: &str = "cobox";
const PLAIN_TEXT: &str = "text/plain";
/// D-Bus error for a name that no service owns and that no service can be started for.
const NO_SERVICE: &str = "org.freedesktop.DBus.Error.ServiceUnknown";

/// Why the keyring refused the operation, as text.
pub type KeyringRefusal = String;

/// Identifies one key in the keyring: a context's key for one broker. Another URL under the same name is another key.
#[derive(Clone, Debug)]
pub struct Account {
    pub context: String,
    pub url: String,
}

impl Account {
    pub fn store(&self, key: &Secret) -> Result<(), KeyringRefusal> {
        let (account, key) = (self.clone(), key.clone());
        run_on_thread(move |service| {
            Box::pin(async move {
                let collection = service.get_default_collection().await?;
                if collection.is_locked().await? {
                    collection.unlock().await?;
                }
                let label = format!("Cobox API key of context {}", account.context);
                collection.create_item(&label, account.attributes(), key.expose().as_bytes(), true, PLAIN_TEXT).await.map(drop)
            })
        })
    }

    /// `None` if the keyring has no such key.
    pub fn read(&self) -> Result<Option<Secret>, KeyringRefusal> {
        let account = self.clone();
        run_on_thread(move |service| {
            Box::pin(async move {
                let found = service.search_items(account.attributes()).await?;
                let Some(item) = found.unlocked.first().or(found.locked.first()) else { return Ok(None) };
                if item.is_locked().await? {
                    item.unlock().await?;
                }
                let bytes = item.get_secret().await?;
                Ok(String::from_utf8(bytes).ok().map(Secret::new))
            })
        })
    }

    pub fn delete(&self) -> Result<(), KeyringRefusal> {
        let account = self.clone();
        run_on_thread(move |service| {
            Box::pin(async move {
                let found = service.search_items(account.attributes()).await?;
                for item in found.unlocked.iter().chain(&found.locked) {
                    if item.is_locked().await? {
                        item.unlock().await?;
                    }
                    item.delete().await?;
                }
                Ok(())
            })
        })
    }

    fn attributes(&self) -> HashMap<&str, &str> {
        HashMap::from([("application", APPLICATION), ("context", self.context.as_str()), ("url", self.url.as_str())])
    }
}

type KeyringFuture<'a, T> = std::pin::Pin<Box<dyn Future<Output = Result<T, Error>> + 'a>>;

/// Runs on its own thread and runtime: keys are also needed in synchronous code, and a bus that hangs must not block
/// the process.
fn run_on_thread<T: Send + 'static>(
    operation_fn: impl for<'a> FnOnce(&'a SecretService<'static>) -> KeyringFuture<'a, T> + Send + 'static,
) -> Result<T, KeyringRefusal> {
    if !has_bus() {
        return Err("no D-Bus session bus".to_owned());
    }
    let worker = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|e| e.to_string())?;
        let operation = async {
            let connection = tokio::time::timeout(CONNECT_TIMEOUT, SecretService::connect(EncryptionType::Dh)).await;
            let service = connection.map_err(|_| "the keyring does not respond".to_owned())?.map_err(describe_error)?;
            let result = tokio::time::timeout(OPERATION_TIMEOUT, operation_fn(&service)).await;
            result.map_err(|_| format!("the keyring was not unlocked within {} s", OPERATION_TIMEOUT.as_secs()))?.map_err(describe_error)
        };
        let result = runtime.block_on(operation);
        runtime.shutdown_background();
        result
    });
    worker.join().map_err(|_| "the keyring request failed".to_owned())?
}

/// Whether a session bus may exist; without one, a connection attempt would only wait.
fn has_bus() -> bool {
    let has_bus_address = std::env::var_os("DBUS_SESSION_BUS_ADDRESS").is_some_and(|v| !v.is_empty());
    has_bus_address || std::env::var_os("XDG_RUNTIME_DIR").is_some_and(|dir| std::path::Path::new(&dir).join("bus").exists())
}

fn describe_error(e: Error) -> KeyringRefusal {
    match e {
        Error::Locked => "the keyring is locked".to_owned(),
        Error::NoResult => "the keyring has no default collection".to_owned(),
        Error::Prompt => "the keyring was not unlocked".to_owned(),
        Error::Unavailable => "the D-Bus session bus has no keyring service".to_owned(),
        other if other.to_string().contains(NO_SERVICE) => "the D-Bus session bus has no keyring service".to_owned(),
        other => format!("the keyring failed: {other}"),
    }
}
