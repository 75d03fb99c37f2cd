-- The same tables as SQLite's. Times are whole seconds since 1970 in UTC, booleans are 0 and 1. Ended rows stay for a while so
-- that their ids can still be explained. Text is compared by its bytes (COLLATE "C"): ids then sort by the time in them whatever
-- the server's locale, and an upgrade of that locale breaks no index.

CREATE TABLE workspaces (
    id         TEXT COLLATE "C" PRIMARY KEY,
    created_at BIGINT NOT NULL
);

CREATE TABLE principals (
    workspace_id TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    name         TEXT COLLATE "C" NOT NULL,
    kind         TEXT COLLATE "C" NOT NULL CHECK (kind IN ('human', 'agent', 'operator')),
    created_at   BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, name)
);

CREATE TABLE api_keys (
    id           TEXT COLLATE "C" PRIMARY KEY,
    workspace_id TEXT COLLATE "C" NOT NULL,
    principal    TEXT COLLATE "C" NOT NULL,
    -- SHA-256 of the whole key: it has 256 random bits, so nothing slower is needed.
    hash         BYTEA NOT NULL CHECK (length(hash) = 32),
    created_at   BIGINT NOT NULL,
    expires_at   BIGINT,
    last_used_at BIGINT,
    revoked_at   BIGINT,
    FOREIGN KEY (workspace_id, principal) REFERENCES principals (workspace_id, name)
);

CREATE TABLE sandboxes (
    id             TEXT COLLATE "C" PRIMARY KEY,
    workspace_id   TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    name           TEXT COLLATE "C",
    owner          TEXT COLLATE "C" NOT NULL,
    access         TEXT COLLATE "C" NOT NULL CHECK (access IN ('workspace', 'owner')),
    provider       TEXT COLLATE "C" NOT NULL,
    -- The node that hosts it: only its broker may act on it.
    node_id        TEXT COLLATE "C" NOT NULL,
    -- The generation of its token key.
    generation     BIGINT NOT NULL CHECK (generation > 0),
    state          TEXT COLLATE "C" NOT NULL CHECK (state IN ('provisioning', 'active', 'idle', 'suspended', 'terminated', 'failed')),
    -- What is about to be asked of the provider, written before it is asked.
    intent         TEXT COLLATE "C" CHECK (intent IN ('create', 'resume', 'suspend', 'destroy')),
    reason         TEXT COLLATE "C",
    -- It outlives its sessions even without a name.
    kept           BIGINT NOT NULL DEFAULT 0,
    created_at     BIGINT NOT NULL,
    last_active_at BIGINT NOT NULL,
    running_since  BIGINT,
    -- Time spent running before running_since.
    active_seconds BIGINT NOT NULL DEFAULT 0,
    suspended_at   BIGINT,
    ended_at       BIGINT
);

CREATE UNIQUE INDEX sandboxes_by_name ON sandboxes (workspace_id, name) WHERE name IS NOT NULL AND ended_at IS NULL;
CREATE INDEX sandboxes_of_workspace ON sandboxes (workspace_id, id) WHERE ended_at IS NULL;
CREATE INDEX sandboxes_of_node ON sandboxes (node_id) WHERE ended_at IS NULL OR intent IS NOT NULL;
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;

CREATE TABLE sessions (
    id           TEXT COLLATE "C" PRIMARY KEY,
    workspace_id TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    scope_type   TEXT COLLATE "C" NOT NULL,
    scope_id     TEXT COLLATE "C" NOT NULL,
    sandbox_id   TEXT COLLATE "C" NOT NULL REFERENCES sandboxes (id),
    owner        TEXT COLLATE "C" NOT NULL,
    access       TEXT COLLATE "C" NOT NULL CHECK (access IN ('workspace', 'owner')),
    created_at   BIGINT NOT NULL,
    -- The sandbox's running time when the session began: its own hard end counts from there.
    active_base  BIGINT NOT NULL DEFAULT 0,
    ended_at     BIGINT,
    end_reason   TEXT COLLATE "C"
);

-- What makes racing negotiations of one scope agree.
CREATE UNIQUE INDEX sessions_by_scope ON sessions (workspace_id, scope_type, scope_id) WHERE ended_at IS NULL;
CREATE INDEX sessions_of_sandbox ON sessions (sandbox_id);

CREATE TABLE idempotency (
    workspace_id TEXT COLLATE "C" NOT NULL,
    principal    TEXT COLLATE "C" NOT NULL,
    key          TEXT COLLATE "C" NOT NULL,
    request_hash BYTEA NOT NULL,
    session_id   TEXT COLLATE "C" NOT NULL REFERENCES sessions (id),
    created_at   BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, principal, key)
);

CREATE INDEX idempotency_by_age ON idempotency (created_at);
CREATE INDEX idempotency_of_session ON idempotency (session_id);

CREATE TABLE revocations (
    sequence     BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    workspace_id TEXT COLLATE "C" NOT NULL,
    -- Null: counts in every sandbox of the workspace.
    sandbox_id   TEXT COLLATE "C",
    kind         TEXT COLLATE "C" NOT NULL CHECK (kind IN ('jti', 'grant', 'session', 'principal')),
    value        TEXT COLLATE "C" NOT NULL,
    created_at   BIGINT NOT NULL,
    -- Every token it could concern has expired by then.
    until        BIGINT NOT NULL
);

CREATE INDEX revocations_of_workspace ON revocations (workspace_id, sandbox_id);
CREATE INDEX revocations_by_age ON revocations (until);

CREATE TABLE audit (
    sequence     BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           BIGINT NOT NULL,
    workspace_id TEXT COLLATE "C" NOT NULL,
    action       TEXT COLLATE "C" NOT NULL,
    request_id   TEXT COLLATE "C",
    principal    TEXT COLLATE "C",
    actor        TEXT COLLATE "C",
    thread       TEXT COLLATE "C",
    session_id   TEXT COLLATE "C",
    sandbox_id   TEXT COLLATE "C",
    jti          TEXT COLLATE "C",
    detail       TEXT COLLATE "C"
);

CREATE INDEX audit_by_age ON audit (at);
