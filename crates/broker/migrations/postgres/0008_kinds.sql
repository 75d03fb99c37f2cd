-- What a sandbox is made of, as JSON: the same each time it starts. Null: what its provider gives everybody.
ALTER TABLE sandboxes ADD COLUMN making TEXT COLLATE "C";
-- The template it was made by.
ALTER TABLE sandboxes ADD COLUMN template TEXT COLLATE "C";
-- The pool it waits in to be taken.
ALTER TABLE sandboxes ADD COLUMN pool_id TEXT COLLATE "C";

CREATE INDEX sandboxes_of_pool ON sandboxes (pool_id) WHERE pool_id IS NOT NULL;

CREATE TABLE templates (
    workspace_id TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    name         TEXT COLLATE "C" NOT NULL,
    owner        TEXT COLLATE "C" NOT NULL,
    -- As JSON.
    spec         TEXT COLLATE "C" NOT NULL,
    created_at   BIGINT NOT NULL,
    updated_at   BIGINT NOT NULL,
    PRIMARY KEY (workspace_id, name)
);

CREATE TABLE snapshots (
    id           TEXT COLLATE "C" PRIMARY KEY,
    workspace_id TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    name         TEXT COLLATE "C" NOT NULL,
    -- A name and a tag stand for the newest that is ready.
    tag          TEXT COLLATE "C" NOT NULL,
    owner        TEXT COLLATE "C" NOT NULL,
    access       TEXT COLLATE "C" NOT NULL CHECK (access IN ('workspace', 'owner')),
    provider     TEXT COLLATE "C" NOT NULL,
    -- Where its files are: only sandboxes there can start from it.
    node_id      TEXT COLLATE "C" NOT NULL,
    -- Written before the files are.
    state        TEXT COLLATE "C" NOT NULL CHECK (state IN ('building', 'ready', 'failed', 'deleting')),
    reason       TEXT COLLATE "C",
    sandbox_id   TEXT COLLATE "C",
    -- What its sandbox was made of, which it stands on.
    making       TEXT COLLATE "C",
    size_bytes   BIGINT,
    created_at   BIGINT NOT NULL,
    updated_at   BIGINT NOT NULL
);

CREATE INDEX snapshots_by_name ON snapshots (workspace_id, name, tag, id);
CREATE INDEX snapshots_of_workspace ON snapshots (workspace_id, id);
CREATE INDEX snapshots_of_node ON snapshots (node_id) WHERE state IN ('building', 'deleting');

CREATE TABLE volumes (
    id           TEXT COLLATE "C" PRIMARY KEY,
    workspace_id TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    name         TEXT COLLATE "C" NOT NULL,
    owner        TEXT COLLATE "C" NOT NULL,
    access       TEXT COLLATE "C" NOT NULL CHECK (access IN ('workspace', 'owner')),
    provider     TEXT COLLATE "C" NOT NULL,
    node_id      TEXT COLLATE "C" NOT NULL,
    state        TEXT COLLATE "C" NOT NULL CHECK (state IN ('making', 'ready', 'deleting')),
    size_bytes   BIGINT NOT NULL,
    created_at   BIGINT NOT NULL,
    updated_at   BIGINT NOT NULL
);

CREATE UNIQUE INDEX volumes_by_name ON volumes (workspace_id, name) WHERE state <> 'deleting';
CREATE INDEX volumes_of_node ON volumes (node_id) WHERE state <> 'ready';

CREATE TABLE pools (
    id           TEXT COLLATE "C" PRIMARY KEY,
    workspace_id TEXT COLLATE "C" NOT NULL REFERENCES workspaces (id),
    name         TEXT COLLATE "C" NOT NULL,
    template     TEXT COLLATE "C" NOT NULL,
    owner        TEXT COLLATE "C" NOT NULL,
    owner_kind   TEXT COLLATE "C" NOT NULL CHECK (owner_kind IN ('human', 'agent', 'operator')),
    replicas     BIGINT NOT NULL CHECK (replicas >= 0),
    created_at   BIGINT NOT NULL,
    updated_at   BIGINT NOT NULL
);

CREATE UNIQUE INDEX pools_by_name ON pools (workspace_id, name);
