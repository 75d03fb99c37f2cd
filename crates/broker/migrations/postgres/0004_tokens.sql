-- Whom else a session was opened to, and for what. A changed share that gives less has a new id: tokens end with the one they came by.
CREATE TABLE shares (
    id           TEXT COLLATE "C" PRIMARY KEY,
    workspace_id TEXT COLLATE "C" NOT NULL,
    session_id   TEXT COLLATE "C" NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    principal    TEXT COLLATE "C" NOT NULL,
    -- Words with spaces between them.
    capabilities TEXT COLLATE "C" NOT NULL,
    shared_by    TEXT COLLATE "C" NOT NULL,
    created_at   BIGINT NOT NULL,
    expires_at   BIGINT,
    UNIQUE (session_id, principal)
);

CREATE INDEX shares_of_principal ON shares (workspace_id, principal);

-- What an opaque token says. The token itself is nowhere: it has 256 random bits, so its SHA-256 is enough to know it by.
CREATE TABLE opaque_tokens (
    hash       BYTEA PRIMARY KEY CHECK (length(hash) = 32),
    claims     TEXT COLLATE "C" NOT NULL,
    -- It proves nothing any more from then on.
    keep_until BIGINT NOT NULL
);

CREATE INDEX opaque_tokens_by_age ON opaque_tokens (keep_until);

-- Set where only what was issued up to a moment is revoked: what is issued later counts.
ALTER TABLE revocations ADD COLUMN issued_by BIGINT;

-- After a graceful rotation, tokens of the generations from here on are good until then.
ALTER TABLE sandboxes ADD COLUMN old_keys_from BIGINT;
ALTER TABLE sandboxes ADD COLUMN old_keys_until BIGINT;
-- Generations below were derived from the master key before this one.
ALTER TABLE sandboxes ADD COLUMN master_from BIGINT NOT NULL DEFAULT 1;
