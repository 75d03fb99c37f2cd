//! The migrations that bring a database's tables up to date: one list, with the SQL of each step for every database.

use std::borrow::Cow;

use sqlx::{
    AnyPool, SqlSafeStr,
    migrate::{MigrateError, Migration, MigrationType, Migrator},
};

type Step = (i64, &'static str, &'static str);

/// Add a step at the end, with a file of that name in both directories. Never change a released one.
macro_rules! steps {
    ($database:literal) => {
        [
            (1, "first schema", include_str!(concat!("../../migrations/", $database, "/0001_first_schema.sql"))),
            (2, "many brokers", include_str!(concat!("../../migrations/", $database, "/0002_many_brokers.sql"))),
            (3, "tags and retired tokens", include_str!(concat!("../../migrations/", $database, "/0003_tags_and_retired_tokens.sql"))),
            (4, "tokens", include_str!(concat!("../../migrations/", $database, "/0004_tokens.sql"))),
            (5, "events and audit chain", include_str!(concat!("../../migrations/", $database, "/0005_events_and_audit_chain.sql"))),
            (6, "policy and principals", include_str!(concat!("../../migrations/", $database, "/0006_policy_and_principals.sql"))),
            (7, "revocations by value", include_str!(concat!("../../migrations/", $database, "/0007_revocations_by_value.sql"))),
            (8, "kinds", include_str!(concat!("../../migrations/", $database, "/0008_kinds.sql"))),
            (9, "own lifetimes", include_str!(concat!("../../migrations/", $database, "/0009_own_lifetimes.sql"))),
            (10, "pools in trouble", include_str!(concat!("../../migrations/", $database, "/0010_pools_in_trouble.sql"))),
            (11, "hard ends", include_str!(concat!("../../migrations/", $database, "/0011_hard_ends.sql"))),
            (12, "node instances", include_str!(concat!("../../migrations/", $database, "/0012_node_instances.sql"))),
            (13, "beats", include_str!(concat!("../../migrations/", $database, "/0013_beats.sql"))),
            (14, "deleted sandboxes", include_str!(concat!("../../migrations/", $database, "/0014_deleted_sandboxes.sql"))),
            (15, "downtime", include_str!(concat!("../../migrations/", $database, "/0015_downtime.sql"))),
        ]
    };
}

pub const SQLITE: &[Step] = &steps!("sqlite");
pub const POSTGRES: &[Step] = &steps!("postgres");

/// Several brokers may do this at once: on PostgreSQL they wait for each other, on SQLite there is only one.
pub async fn bring_up_to_date(pool: &AnyPool, steps: &[Step]) -> Result<(), MigrateError> {
    let migrations = steps
        .iter()
        .map(|(version, name, sql)| Migration::new(*version, Cow::Borrowed(*name), MigrationType::Simple, sql.into_sql_str(), false));
    Migrator::with_migrations(migrations.collect()).run(pool).await
}
