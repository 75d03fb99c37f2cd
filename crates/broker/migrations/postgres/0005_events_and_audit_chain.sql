-- What happened to sandboxes and their sessions, for whoever watches. Numbers grow in the order in which readers come to see them.
CREATE TABLE events (
    sequence     BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at           BIGINT NOT NULL,
    workspace_id TEXT COLLATE "C" NOT NULL,
    sandbox_id   TEXT COLLATE "C" NOT NULL,
    -- Null: of the sandbox, and so of every session on it.
    session_id   TEXT COLLATE "C",
    principal    TEXT COLLATE "C",
    actor        TEXT COLLATE "C",
    -- 1: the sandbox's own word.
    claimed      BIGINT NOT NULL,
    -- The rest, as JSON.
    what         TEXT COLLATE "C" NOT NULL
);

CREATE INDEX events_of_sandbox ON events (sandbox_id, sequence);
CREATE INDEX events_of_workspace ON events (workspace_id, sequence);
CREATE INDEX events_by_age ON events (at);

-- Up to where a sandbox's own words were taken (in which life of its daemon), and its events removed.
CREATE TABLE event_marks (
    sandbox_id TEXT COLLATE "C" PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
    life       TEXT COLLATE "C" NOT NULL DEFAULT '',
    taken      BIGINT NOT NULL DEFAULT 0,
    pruned     BIGINT NOT NULL DEFAULT 0
);

-- Every record is a link in its writer's chain. Null: from before there were chains. Empty: about to be linked, in a transaction that
-- isn't committed yet.
ALTER TABLE audit ADD COLUMN writer TEXT COLLATE "C";
ALTER TABLE audit ADD COLUMN number BIGINT;
ALTER TABLE audit ADD COLUMN hash BYTEA;

CREATE UNIQUE INDEX audit_links ON audit (writer, number);
CREATE INDEX audit_by_token ON audit (jti) WHERE jti IS NOT NULL;

-- Where each chain begins since its older records were removed.
CREATE TABLE audit_anchors (
    writer TEXT COLLATE "C" PRIMARY KEY,
    number BIGINT NOT NULL,
    hash   BYTEA NOT NULL
);
