-- What a sandbox is made of, as JSON: the same each time it starts. Null: what its provider gives everybody.
ALTER TABLE sandboxes ADD COLUMN making TEXT;
-- The template it was made by.
ALTER TABLE sandboxes ADD COLUMN template TEXT;
-- The pool it waits in to be taken.
ALTER TABLE sandboxes ADD COLUMN pool_id TEXT;

CREATE INDEX sandboxes_of_pool ON sandboxes (pool_id) WHERE pool_id IS NOT NULL;

CREATE TABLE templates (
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    name         TEXT NOT NULL,
    owner        TEXT NOT NULL,
    -- As JSON.
    spec         TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    updated_at   INTEGER NOT NULL,
    PRIMARY KEY (workspace_id, name)
);

CREATE TABLE snapshots (
    id           TEXT PRIMARY KEY,
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    name         TEXT NOT NULL,
    -- A name and a tag stand for the newest that is ready.
    tag          TEXT NOT NULL,
    owner        TEXT NOT NULL,
    access       TEXT NOT NULL CHECK (access IN ('workspace', 'owner')),
    provider     TEXT NOT NULL,
    -- Where its files are: only sandboxes there can start from it.
    node_id      TEXT NOT NULL,
    -- Written before the files are.
    state        TEXT NOT NULL CHECK (state IN ('building', 'ready', 'failed', 'deleting')),
    reason       TEXT,
    sandbox_id   TEXT,
    -- What its sandbox was made of, which it stands on.
    making       TEXT,
    size_bytes   INTEGER,
    created_at   INTEGER NOT NULL,
    updated_at   INTEGER NOT NULL
);

CREATE INDEX snapshots_by_name ON snapshots (workspace_id, name, tag, id);
CREATE INDEX snapshots_of_workspace ON snapshots (workspace_id, id);
CREATE INDEX snapshots_of_node ON snapshots (node_id) WHERE state IN ('building', 'deleting');

CREATE TABLE volumes (
    id           TEXT PRIMARY KEY,
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    name         TEXT NOT NULL,
    owner        TEXT NOT NULL,
    access       TEXT NOT NULL CHECK (access IN ('workspace', 'owner')),
    provider     TEXT NOT NULL,
    node_id      TEXT NOT NULL,
    state        TEXT NOT NULL CHECK (state IN ('making', 'ready', 'deleting')),
    size_bytes   INTEGER NOT NULL,
    created_at   INTEGER NOT NULL,
    updated_at   INTEGER NOT NULL
);

CREATE UNIQUE INDEX volumes_by_name ON volumes (workspace_id, name) WHERE state <> 'deleting';
CREATE INDEX volumes_of_node ON volumes (node_id) WHERE state <> 'ready';

CREATE TABLE pools (
    id           TEXT PRIMARY KEY,
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    name         TEXT NOT NULL,
    template     TEXT NOT NULL,
    owner        TEXT NOT NULL,
    owner_kind   TEXT NOT NULL CHECK (owner_kind IN ('human', 'agent', 'operator')),
    replicas     INTEGER NOT NULL CHECK (replicas >= 0),
    created_at   INTEGER NOT NULL,
    updated_at   INTEGER NOT NULL
);

CREATE UNIQUE INDEX pools_by_name ON pools (workspace_id, name);
