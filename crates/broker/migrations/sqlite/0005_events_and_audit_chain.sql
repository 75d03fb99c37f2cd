-- What happened to sandboxes and their sessions, for whoever watches. Numbers grow in the order in which readers come to see them.
CREATE TABLE events (
    sequence     INTEGER PRIMARY KEY AUTOINCREMENT,
    at           INTEGER NOT NULL,
    workspace_id TEXT NOT NULL,
    sandbox_id   TEXT NOT NULL,
    -- Null: of the sandbox, and so of every session on it.
    session_id   TEXT,
    principal    TEXT,
    actor        TEXT,
    -- 1: the sandbox's own word.
    claimed      INTEGER NOT NULL,
    -- The rest, as JSON.
    what         TEXT NOT NULL
) STRICT;

CREATE INDEX events_of_sandbox ON events (sandbox_id, sequence);
CREATE INDEX events_of_workspace ON events (workspace_id, sequence);
CREATE INDEX events_by_age ON events (at);

-- Up to where a sandbox's own words were taken (in which life of its daemon), and its events removed.
CREATE TABLE event_marks (
    sandbox_id TEXT PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
    life       TEXT NOT NULL DEFAULT '',
    taken      INTEGER NOT NULL DEFAULT 0,
    pruned     INTEGER NOT NULL DEFAULT 0
) STRICT;

-- Every record is a link in its writer's chain. Null: from before there were chains. Empty: about to be linked, in a transaction that
-- isn't committed yet.
ALTER TABLE audit ADD COLUMN writer TEXT;
ALTER TABLE audit ADD COLUMN number INTEGER;
ALTER TABLE audit ADD COLUMN hash BLOB;

CREATE UNIQUE INDEX audit_links ON audit (writer, number);
CREATE INDEX audit_by_token ON audit (jti) WHERE jti IS NOT NULL;

-- Where each chain begins since its older records were removed.
CREATE TABLE audit_anchors (
    writer TEXT PRIMARY KEY,
    number INTEGER NOT NULL,
    hash   BLOB NOT NULL
) STRICT;
