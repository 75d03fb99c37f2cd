-- What a sandbox's owner is: how long it lives depends on it.
ALTER TABLE sandboxes ADD COLUMN owner_kind TEXT COLLATE "C" NOT NULL DEFAULT 'human' CHECK (owner_kind IN ('human', 'agent', 'operator'));
UPDATE sandboxes SET owner_kind = p.kind FROM principals p WHERE p.workspace_id = sandboxes.workspace_id AND p.name = sandboxes.owner;

-- How many one principal has.
CREATE INDEX sandboxes_of_owner ON sandboxes (workspace_id, owner) WHERE ended_at IS NULL;

-- A principal that was shut out keeps its name and its history.
ALTER TABLE principals ADD COLUMN disabled_at BIGINT;
ALTER TABLE principals ADD COLUMN disabled_by TEXT COLLATE "C";

-- A key without a secret stands for an identity at an OIDC issuer; its hash is of both names.
ALTER TABLE api_keys ADD COLUMN issuer TEXT COLLATE "C";
ALTER TABLE api_keys ADD COLUMN subject TEXT COLLATE "C";
-- It was revoked, and its principal let in again since: the next sign-in makes another.
ALTER TABLE api_keys ADD COLUMN is_past BIGINT NOT NULL DEFAULT 0;

CREATE UNIQUE INDEX api_keys_of_identity ON api_keys (workspace_id, principal, hash) WHERE issuer IS NOT NULL AND is_past = 0;
CREATE INDEX api_keys_of_principal ON api_keys (workspace_id, principal);
