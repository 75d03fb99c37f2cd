-- Times are whole seconds since 1970 in UTC. Ended rows stay for a while so that their ids can still be explained.

CREATE TABLE workspaces (
    id         TEXT PRIMARY KEY,
    created_at INTEGER NOT NULL
) STRICT;

CREATE TABLE principals (
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    name         TEXT NOT NULL,
    kind         TEXT NOT NULL CHECK (kind IN ('human', 'agent', 'operator')),
    created_at   INTEGER NOT NULL,
    PRIMARY KEY (workspace_id, name)
) STRICT;

CREATE TABLE api_keys (
    id           TEXT PRIMARY KEY,
    workspace_id TEXT NOT NULL,
    principal    TEXT NOT NULL,
    -- SHA-256 of the whole key: it has 256 random bits, so nothing slower is needed.
    hash         BLOB NOT NULL CHECK (length(hash) = 32),
    created_at   INTEGER NOT NULL,
    expires_at   INTEGER,
    last_used_at INTEGER,
    revoked_at   INTEGER,
    FOREIGN KEY (workspace_id, principal) REFERENCES principals (workspace_id, name)
) STRICT;

CREATE TABLE sandboxes (
    id             TEXT PRIMARY KEY,
    workspace_id   TEXT NOT NULL REFERENCES workspaces (id),
    name           TEXT,
    owner          TEXT NOT NULL,
    access         TEXT NOT NULL CHECK (access IN ('workspace', 'owner')),
    provider       TEXT NOT NULL,
    -- The node that hosts it: only its broker may act on it.
    node_id        TEXT NOT NULL,
    -- The generation of its token key.
    generation     INTEGER NOT NULL CHECK (generation > 0),
    state          TEXT NOT NULL CHECK (state IN ('provisioning', 'active', 'idle', 'suspended', 'terminated', 'failed')),
    -- What is about to be asked of the provider, written before it is asked.
    intent         TEXT CHECK (intent IN ('create', 'resume', 'suspend', 'destroy')),
    reason         TEXT,
    -- It outlives its sessions even without a name.
    kept           INTEGER NOT NULL DEFAULT 0,
    created_at     INTEGER NOT NULL,
    last_active_at INTEGER NOT NULL,
    running_since  INTEGER,
    -- Time spent running before running_since.
    active_seconds INTEGER NOT NULL DEFAULT 0,
    suspended_at   INTEGER,
    ended_at       INTEGER
) STRICT;

CREATE UNIQUE INDEX sandboxes_by_name ON sandboxes (workspace_id, name) WHERE name IS NOT NULL AND ended_at IS NULL;
CREATE INDEX sandboxes_of_workspace ON sandboxes (workspace_id, id) WHERE ended_at IS NULL;
CREATE INDEX sandboxes_of_node ON sandboxes (node_id) WHERE ended_at IS NULL OR intent IS NOT NULL;
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE sessions (
    id           TEXT PRIMARY KEY,
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    scope_type   TEXT NOT NULL,
    scope_id     TEXT NOT NULL,
    sandbox_id   TEXT NOT NULL REFERENCES sandboxes (id),
    owner        TEXT NOT NULL,
    access       TEXT NOT NULL CHECK (access IN ('workspace', 'owner')),
    created_at   INTEGER NOT NULL,
    -- The sandbox's running time when the session began: its own hard end counts from there.
    active_base  INTEGER NOT NULL DEFAULT 0,
    ended_at     INTEGER,
    end_reason   TEXT
) STRICT;

-- What makes racing negotiations of one scope agree.
CREATE UNIQUE INDEX sessions_by_scope ON sessions (workspace_id, scope_type, scope_id) WHERE ended_at IS NULL;
CREATE INDEX sessions_of_sandbox ON sessions (sandbox_id);

CREATE TABLE idempotency (
    workspace_id TEXT NOT NULL,
    principal    TEXT NOT NULL,
    key          TEXT NOT NULL,
    request_hash BLOB NOT NULL,
    session_id   TEXT NOT NULL REFERENCES sessions (id),
    created_at   INTEGER NOT NULL,
    PRIMARY KEY (workspace_id, principal, key)
) STRICT;

CREATE INDEX idempotency_by_age ON idempotency (created_at);
CREATE INDEX idempotency_of_session ON idempotency (session_id);

CREATE TABLE revocations (
    sequence     INTEGER PRIMARY KEY AUTOINCREMENT,
    workspace_id TEXT NOT NULL,
    -- Null: counts in every sandbox of the workspace.
    sandbox_id   TEXT,
    kind         TEXT NOT NULL CHECK (kind IN ('jti', 'grant', 'session', 'principal')),
    value        TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    -- Every token it could concern has expired by then.
    until        INTEGER NOT NULL
) STRICT;

CREATE INDEX revocations_of_workspace ON revocations (workspace_id, sandbox_id);
CREATE INDEX revocations_by_age ON revocations (until);

CREATE TABLE audit (
    sequence     INTEGER PRIMARY KEY AUTOINCREMENT,
    at           INTEGER NOT NULL,
    workspace_id TEXT NOT NULL,
    action       TEXT NOT NULL,
    request_id   TEXT,
    principal    TEXT,
    actor        TEXT,
    thread       TEXT,
    session_id   TEXT,
    sandbox_id   TEXT,
    jti          TEXT,
    detail       TEXT
) STRICT;

CREATE INDEX audit_by_age ON audit (at);
