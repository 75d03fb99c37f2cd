-- Whom else a session was opened to, and for what. A changed share that gives less has a new id: tokens end with the one they came by.
CREATE TABLE shares (
    id           TEXT PRIMARY KEY,
    workspace_id TEXT NOT NULL,
    session_id   TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    principal    TEXT NOT NULL,
    -- Words with spaces between them.
    capabilities TEXT NOT NULL,
    shared_by    TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    expires_at   INTEGER,
    UNIQUE (session_id, principal)
) STRICT;

CREATE INDEX shares_of_principal ON shares (workspace_id, principal);

-- What an opaque token says. The token itself is nowhere: it has 256 random bits, so its SHA-256 is enough to know it by.
CREATE TABLE opaque_tokens (
    hash       BLOB PRIMARY KEY CHECK (length(hash) = 32),
    claims     TEXT NOT NULL,
    -- It proves nothing any more from then on.
    keep_until INTEGER NOT NULL
) STRICT;

CREATE INDEX opaque_tokens_by_age ON opaque_tokens (keep_until);

-- Set where only what was issued up to a moment is revoked: what is issued later counts.
ALTER TABLE revocations ADD COLUMN issued_by INTEGER;

-- After a graceful rotation, tokens of the generations from here on are good until then.
ALTER TABLE sandboxes ADD COLUMN old_keys_from INTEGER;
ALTER TABLE sandboxes ADD COLUMN old_keys_until INTEGER;
-- Generations below were derived from the master key before this one.
ALTER TABLE sandboxes ADD COLUMN master_from INTEGER NOT NULL DEFAULT 1;
