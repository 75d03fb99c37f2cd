//! Classifies database errors: the connection is lost, the database is unavailable now, or the request is at fault.

use sqlx::error::DatabaseError;

use crate::store::StoreError;

/// Length of PostgreSQL's codes (SQLSTATE). SQLite's are decimal numbers of at most four digits.
const SQLSTATE_CHARS: usize = 5;
/// SQLite's primary result codes: BUSY, LOCKED, NOMEM, READONLY, IOERR, FULL, CANTOPEN. The low byte of an extended code
/// is its primary one.
const SQLITE_UNAVAILABLE: [u32; 7] = [5, 6, 7, 8, 10, 13, 14];

impl From<sqlx::Error> for StoreError {
    fn from(e: sqlx::Error) -> Self {
        use sqlx::Error as E;
        match &e {
            E::ColumnDecode { .. } | E::Decode(_) => StoreError::Corrupt(e.to_string()),
            E::Io(_) | E::Tls(_) | E::Protocol(_) | E::PoolTimedOut | E::PoolClosed | E::WorkerCrashed => {
                StoreError::Unreachable(e.to_string())
            }
            E::Database(error) => of_database(&**error),
            _ => StoreError::Failed(e.to_string()),
        }
    }
}

fn of_database(error: &dyn DatabaseError) -> StoreError {
    let code = error.code().unwrap_or_default().into_owned();
    let message = format!("{} (code {code})", error.message());
    if code.len() == SQLSTATE_CHARS { of_postgres(&code, message) } else { of_sqlite(&code, message) }
}

fn of_postgres(code: &str, message: String) -> StoreError {
    match code {
        // Shutting down, crashed, starting up, out of connections; or a server that became a standby, where a new
        // connection to the same address leads to the new primary.
        "57P01" | "57P02" | "57P03" | "57P05" | "53300" | "25006" | "25P03" => StoreError::Unreachable(message),
        // The database was dropped or renamed, or the login is refused: while it is restored or its password is changed.
        "57P04" | "3D000" | "28000" | "28P01" => StoreError::Unreachable(message),
        _ if code.starts_with("08") => StoreError::Unreachable(message),
        // Timeouts, deadlocks, serialisation.
        "57014" | "55P03" | "40001" | "40P01" => StoreError::Unavailable(message),
        // A missing table. The start creates all of them, so the database is being restored.
        "42P01" => StoreError::Unavailable(message),
        // Resources (a full disk among them) and errors of the underlying system.
        _ if code.starts_with("53") || code.starts_with("58") => StoreError::Unavailable(message),
        _ => StoreError::Failed(message),
    }
}

fn of_sqlite(code: &str, message: String) -> StoreError {
    let primary = code.parse::<u32>().map(|code| code & 0xff);
    match primary {
        Ok(primary) if SQLITE_UNAVAILABLE.contains(&primary) => StoreError::Unavailable(message),
        _ => StoreError::Failed(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn database_errors_are_classified_as_unreachable_unavailable_or_failed() {
        let postgres = |code| of_postgres(code, String::new());
        for code in ["57P01", "57P03", "57P04", "08006", "3D000", "28000", "28P01", "53300", "25006"] {
            assert!(matches!(postgres(code), StoreError::Unreachable(_)), "{code}");
        }
        for code in ["53100", "58030", "57014", "40P01", "42P01"] {
            assert!(matches!(postgres(code), StoreError::Unavailable(_)), "{code}");
        }
        for code in ["23505", "42601"] {
            assert!(matches!(postgres(code), StoreError::Failed(_)), "{code}");
        }
        // FULL, READONLY_DBMOVED, IOERR_WRITE, BUSY.
        for code in ["13", "1032", "778", "5"] {
            assert!(matches!(of_sqlite(code, String::new()), StoreError::Unavailable(_)), "{code}");
        }
        // CONSTRAINT_UNIQUE, ERROR.
        for code in ["2067", "1", ""] {
            assert!(matches!(of_sqlite(code, String::new()), StoreError::Failed(_)), "{code}");
        }
    }
}
