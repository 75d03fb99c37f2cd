-- Tags of a session, and of a sandbox: gone with what they are on.
CREATE TABLE session_tags (
    session_id   TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    workspace_id TEXT NOT NULL,
    key          TEXT NOT NULL,
    value        TEXT NOT NULL,
    PRIMARY KEY (session_id, key)
) STRICT;

CREATE INDEX session_tags_by_value ON session_tags (workspace_id, key, value, session_id);

CREATE TABLE sandbox_tags (
    sandbox_id   TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    workspace_id TEXT NOT NULL,
    key          TEXT NOT NULL,
    value        TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, key)
) STRICT;

CREATE INDEX sandbox_tags_by_value ON sandbox_tags (workspace_id, key, value, sandbox_id);

-- A revocation counts from here on: a token that was replaced lives on for a moment.
ALTER TABLE revocations ADD COLUMN starts_at INTEGER NOT NULL DEFAULT 0;
