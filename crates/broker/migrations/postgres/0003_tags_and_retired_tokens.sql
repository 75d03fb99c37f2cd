-- Tags of a session, and of a sandbox: gone with what they are on.
CREATE TABLE session_tags (
    session_id   TEXT COLLATE "C" NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    workspace_id TEXT COLLATE "C" NOT NULL,
    key          TEXT COLLATE "C" NOT NULL,
    value        TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (session_id, key)
);

CREATE INDEX session_tags_by_value ON session_tags (workspace_id, key, value, session_id);

CREATE TABLE sandbox_tags (
    sandbox_id   TEXT COLLATE "C" NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    workspace_id TEXT COLLATE "C" NOT NULL,
    key          TEXT COLLATE "C" NOT NULL,
    value        TEXT COLLATE "C" NOT NULL,
    PRIMARY KEY (sandbox_id, key)
);

CREATE INDEX sandbox_tags_by_value ON sandbox_tags (workspace_id, key, value, sandbox_id);

-- A revocation counts from here on: a token that was replaced lives on for a moment.
ALTER TABLE revocations ADD COLUMN starts_at BIGINT NOT NULL DEFAULT 0;
