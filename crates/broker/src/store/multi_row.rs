//! SQL text for statements with many rows.

use sqlx::AnyConnection;

/// Rows per statement: a statement costs more than a row, and each length is a separate prepared statement of the
/// connection.
pub const ROWS_AT_ONCE: usize = 32;

/// `$first, …` for a list of `count` values.
pub fn placeholders(first: usize, count: usize) -> String {
    (first..first + count).map(|n| format!("${n}")).collect::<Vec<_>>().join(", ")
}

/// `(…), (…)` for inserting `count` rows. SQLite looks up each numbered placeholder among all on every execution, so
/// there they are positional.
pub fn values(db: &AnyConnection, count: usize, columns: usize) -> String {
    let row = |n: usize| match db.backend_name() {
        "SQLite" => vec!["?"; columns].join(", "),
        _ => placeholders(n * columns + 1, columns),
    };
    (0..count).map(|n| format!("({})", row(n))).collect::<Vec<_>>().join(", ")
}
