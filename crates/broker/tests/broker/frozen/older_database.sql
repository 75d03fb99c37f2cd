PRAGMA foreign_keys=OFF;
BEGIN TRANSACTION;
CREATE TABLE _sqlx_migrations (
    version BIGINT PRIMARY KEY,
    description TEXT NOT NULL,
    installed_on TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP,
    success BOOLEAN NOT NULL,
    checksum BLOB NOT NULL,
    execution_time BIGINT NOT NULL
);
INSERT INTO _sqlx_migrations VALUES(1,'first schema','2026-11-18 20:35:46',1,X'b707eaf8dbcde4ef8e4b9e817c98a0f43e59d7130bf210e0ec779b41149ac426e257c20dd2ca1d70e33404ebd645c987',2442140);
INSERT INTO _sqlx_migrations VALUES(2,'many brokers','2026-11-18 20:35:46',1,X'd6b34c314d481e2222be8d7b8e419ce9d1750a7d4f50489e0edf37f7c6654b653edb91c8878423049ebeb90f00a934c9',2665536);
INSERT INTO _sqlx_migrations VALUES(3,'tags and retired tokens','2026-11-18 20:35:46',1,X'ae154a8e830bef1f46219abb04c19fc076970efbd7c548be516be1f0e951eae005cda689100d12c9143897ef0d4b8e25',2699294);
INSERT INTO _sqlx_migrations VALUES(4,'tokens','2026-11-18 20:35:46',1,X'd066512cb520347c4680b0c61da1156ee1e8f18a5b3600067e310a8399c1b386d0c6610124edb72d055541cb2e986303',3199306);
INSERT INTO _sqlx_migrations VALUES(5,'events and audit chain','2026-11-18 20:35:46',1,X'444dc4d420675855f1534a5498233d3ec1a94468e85964e5490e3202efda3b82f6102d5f66e30087b78c0b31a70e6b60',2224568);
INSERT INTO _sqlx_migrations VALUES(6,'policy and principals','2026-11-18 20:35:46',1,X'9b42a983a5e11181faab19864dc3961ba12e95585679261d8385f4e014660e10d15fb602cd14010487e0c266a9ba62dc',2702406);
INSERT INTO _sqlx_migrations VALUES(7,'revocations by value','2026-11-18 20:35:46',1,X'c031f7be304fcf032cc7e140fbe5098d8fcf38fb277fa1190c07d73455823a78856877e32409af2f08dc67319e20b5d6',630936);
INSERT INTO _sqlx_migrations VALUES(8,'kinds','2026-11-18 20:35:46',1,X'9187aa87539d1ce018dae8ff7358c68b33ea9790a1085066bedd3bbc5daf24dcd6879ce2232ef3bea5eba96b4b7a3810',2434131);
INSERT INTO _sqlx_migrations VALUES(9,'own lifetimes','2026-11-18 20:35:46',1,X'e2b251cd97e94073153806e3f418c211e9b3187b6f2b33f046b525388cc53e1656e475455544f72e52a2310f770a128e',1584603);
INSERT INTO _sqlx_migrations VALUES(10,'pools in trouble','2026-11-18 20:35:46',1,X'dfec2a4d62de3b2ecbcd0ec25a985e085fa664d87499b7a7928d2159f09f40b151e3f36a341091adf48975c3b2e4cb67',1779368);
CREATE TABLE workspaces (
    id         TEXT PRIMARY KEY,
    created_at INTEGER NOT NULL
) STRICT;
INSERT INTO workspaces VALUES('default',1795034146);
CREATE TABLE principals (
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    name         TEXT NOT NULL,
    kind         TEXT NOT NULL CHECK (kind IN ('human', 'agent', 'operator')),
    created_at   INTEGER NOT NULL, disabled_at INTEGER, disabled_by TEXT,
    PRIMARY KEY (workspace_id, name)
) STRICT;
INSERT INTO principals VALUES('default','operator','operator',1795034146,NULL,NULL);
INSERT INTO principals VALUES('default','agent','agent',1795034146,NULL,NULL);
INSERT INTO principals VALUES('default','ann','human',1795034146,NULL,NULL);
CREATE TABLE api_keys (
    id           TEXT PRIMARY KEY,
    workspace_id TEXT NOT NULL,
    principal    TEXT NOT NULL,
    -- SHA-256 of the whole key: it has 256 random bits, so nothing slower is needed.
    hash         BLOB NOT NULL CHECK (length(hash) = 32),
    created_at   INTEGER NOT NULL,
    expires_at   INTEGER,
    last_used_at INTEGER,
    revoked_at   INTEGER, issuer TEXT, subject TEXT, is_past INTEGER NOT NULL DEFAULT 0,
    FOREIGN KEY (workspace_id, principal) REFERENCES principals (workspace_id, name)
) STRICT;
INSERT INTO api_keys VALUES('key_01m7r5ysbga06s9k9recj8jj9b','default','operator',X'2bfc5a24a91dace5ea076f2fdd18966c6597c4b87489a0b274114bf7ccd9f0ef',1795034146,NULL,NULL,NULL,NULL,NULL,0);
INSERT INTO api_keys VALUES('key_01m7r5ysbngzr4bjhc7cj88x0b','default','agent',X'1dd0c48b7a1a8fd1137b9515d981b1439ae0e2c39f5918e7c1691e8b75eba026',1795034146,NULL,NULL,NULL,NULL,NULL,0);
INSERT INTO api_keys VALUES('key_01m7r5ysmvd8crzv4hypj9fr36','default','ann',X'f5471083478e805635f63f31f5c489124327ed49c92817e5b778a99e623bef35',1795034146,NULL,NULL,NULL,NULL,NULL,0);
CREATE TABLE sandboxes (
    id             TEXT PRIMARY KEY,
    workspace_id   TEXT NOT NULL REFERENCES workspaces (id),
    name           TEXT,
    owner          TEXT NOT NULL,
    access         TEXT NOT NULL CHECK (access IN ('workspace', 'owner')),
    provider       TEXT NOT NULL,
    -- The node that hosts it: only its broker may act on it.
    node_id        TEXT NOT NULL,
    -- The generation of its token key.
    generation     INTEGER NOT NULL CHECK (generation > 0),
    state          TEXT NOT NULL CHECK (state IN ('provisioning', 'active', 'idle', 'suspended', 'terminated', 'failed')),
    -- What is about to be asked of the provider, written before it is asked.
    intent         TEXT CHECK (intent IN ('create', 'resume', 'suspend', 'destroy')),
    reason         TEXT,
    -- It outlives its sessions even without a name.
    kept           INTEGER NOT NULL DEFAULT 0,
    created_at     INTEGER NOT NULL,
    last_active_at INTEGER NOT NULL,
    running_since  INTEGER,
    -- Time spent running before running_since.
    active_seconds INTEGER NOT NULL DEFAULT 0,
    suspended_at   INTEGER,
    ended_at       INTEGER
, old_keys_from INTEGER, old_keys_until INTEGER, master_from INTEGER NOT NULL DEFAULT 1, owner_kind TEXT NOT NULL DEFAULT 'human' CHECK (owner_kind IN ('human', 'agent', 'operator')), making TEXT, template TEXT, pool_id TEXT, lease_seconds INTEGER, keep_suspended_seconds INTEGER) STRICT;
INSERT INTO sandboxes VALUES('sb_01m7r5ysndbdmkdtxe5c93zb1p','default',NULL,'operator','workspace','local','node_01m7r5ysb8wtna403rvtkwyrmw',1,'active',NULL,NULL,0,1795034146,1795034146,1795034146,0,NULL,NULL,NULL,NULL,1,'operator',NULL,NULL,NULL,NULL,NULL);
INSERT INTO sandboxes VALUES('sb_01m7r5ysrf85828fzwnxsd0xq6','default',NULL,'operator','workspace','local','node_01m7r5ysb8wtna403rvtkwyrmw',1,'terminated',NULL,'it was released',0,1795034146,1795034146,NULL,0,NULL,1795034146,NULL,NULL,1,'operator',NULL,NULL,NULL,NULL,NULL);
CREATE TABLE sessions (
    id           TEXT PRIMARY KEY,
    workspace_id TEXT NOT NULL REFERENCES workspaces (id),
    scope_type   TEXT NOT NULL,
    scope_id     TEXT NOT NULL,
    sandbox_id   TEXT NOT NULL REFERENCES sandboxes (id),
    owner        TEXT NOT NULL,
    access       TEXT NOT NULL CHECK (access IN ('workspace', 'owner')),
    created_at   INTEGER NOT NULL,
    -- The sandbox's running time when the session began: its own hard end counts from there.
    active_base  INTEGER NOT NULL DEFAULT 0,
    ended_at     INTEGER,
    end_reason   TEXT
) STRICT;
INSERT INTO sessions VALUES('ssn_01m7r5ysndrzq0k916f2e3rd4d','default','thread','t','sb_01m7r5ysndbdmkdtxe5c93zb1p','operator','workspace',1795034146,0,NULL,NULL);
INSERT INTO sessions VALUES('ssn_01m7r5ysrfpf6xfecpkkfs45vd','default','thread','gone','sb_01m7r5ysrf85828fzwnxsd0xq6','operator','workspace',1795034146,0,1795034146,'it was released');
CREATE TABLE idempotency (
    workspace_id TEXT NOT NULL,
    principal    TEXT NOT NULL,
    key          TEXT NOT NULL,
    request_hash BLOB NOT NULL,
    session_id   TEXT NOT NULL REFERENCES sessions (id),
    created_at   INTEGER NOT NULL,
    PRIMARY KEY (workspace_id, principal, key)
) STRICT;
CREATE TABLE revocations (
    sequence     INTEGER PRIMARY KEY AUTOINCREMENT,
    workspace_id TEXT NOT NULL,
    -- Null: counts in every sandbox of the workspace.
    sandbox_id   TEXT,
    kind         TEXT NOT NULL CHECK (kind IN ('jti', 'grant', 'session', 'principal')),
    value        TEXT NOT NULL,
    created_at   INTEGER NOT NULL,
    -- Every token it could concern has expired by then.
    until        INTEGER NOT NULL
, starts_at INTEGER NOT NULL DEFAULT 0, issued_by INTEGER) STRICT;
INSERT INTO revocations VALUES(1,'default','sb_01m7r5ysrf85828fzwnxsd0xq6','session','ssn_01m7r5ysrfpf6xfecpkkfs45vd',1795034146,1795041356,1795034146,NULL);
CREATE TABLE audit (
    sequence     INTEGER PRIMARY KEY AUTOINCREMENT,
    at           INTEGER NOT NULL,
    workspace_id TEXT NOT NULL,
    action       TEXT NOT NULL,
    request_id   TEXT,
    principal    TEXT,
    actor        TEXT,
    thread       TEXT,
    session_id   TEXT,
    sandbox_id   TEXT,
    jti          TEXT,
    detail       TEXT
, writer TEXT, number INTEGER, hash BLOB) STRICT;
INSERT INTO audit VALUES(1,1795034146,'default','key.created',NULL,NULL,NULL,NULL,NULL,NULL,NULL,'key_01m7r5ysbga06s9k9recj8jj9b for operator operator','node_01m7r5ysb8wtna403rvtkwyrmw',1,X'eb0e1b98dd4d3d4f44334cfc343f5f6e3cc0bb2f34f02edb0ed0e67b5217e0b0');
INSERT INTO audit VALUES(2,1795034146,'default','key.created',NULL,NULL,NULL,NULL,NULL,NULL,NULL,'key_01m7r5ysbngzr4bjhc7cj88x0b for agent agent','node_01m7r5ysb8wtna403rvtkwyrmw',2,X'5924559c358990ab56517d9fe87b058e03035f6144c3b85455916906b1ab366b');
INSERT INTO audit VALUES(3,1795034146,'default','key.created','req_01m7r5ysms4ww07phk4knkx1dx','operator','operator',NULL,NULL,NULL,NULL,'key_01m7r5ysmvd8crzv4hypj9fr36 for human ann','node_01m7r5ysb8wtna403rvtkwyrmw',3,X'ec460ecbea03462ad2912cfc56f050ac9301b0bd2707698968b833c1d0e1e0a9');
INSERT INTO audit VALUES(4,1795034146,'default','session.created','req_01m7r5ysncvh1d6sjyqhwh07qt','operator','operator','t','ssn_01m7r5ysndrzq0k916f2e3rd4d','sb_01m7r5ysndbdmkdtxe5c93zb1p',NULL,NULL,'node_01m7r5ysb8wtna403rvtkwyrmw',4,X'89c1a1ad60585685dc0d59f3502d173727795054c5d58e838d935d8f09c292c5');
INSERT INTO audit VALUES(5,1795034146,'default','sandbox.started',NULL,NULL,NULL,NULL,NULL,'sb_01m7r5ysndbdmkdtxe5c93zb1p',NULL,'local','node_01m7r5ysb8wtna403rvtkwyrmw',5,X'e4a5dcf19bf58a49ffd4e2c35984f35cf08185d8b839ce9c34dbd0597e0696a3');
INSERT INTO audit VALUES(6,1795034146,'default','token.issued','req_01m7r5ysncvh1d6sjyqhwh07qt','operator','operator','t','ssn_01m7r5ysndrzq0k916f2e3rd4d','sb_01m7r5ysndbdmkdtxe5c93zb1p','tok_01m7r5yspr5prnwnem6abhywm1','fs_read fs_write exec shell','node_01m7r5ysb8wtna403rvtkwyrmw',6,X'56211f2b53c9958347e69e9f49a41697658b74b21eb41567141dd0b832868972');
INSERT INTO audit VALUES(7,1795034146,'default','token.issued','req_01m7r5ysq8ca65kvw03jeg2ezq','operator','operator','t','ssn_01m7r5ysndrzq0k916f2e3rd4d','sb_01m7r5ysndbdmkdtxe5c93zb1p','tok_01m7r5ysq8s01b998wngp8kqva','fs_read fs_write exec shell','node_01m7r5ysb8wtna403rvtkwyrmw',7,X'f3ad5fdae551d4c5d2daa3689d22f75956925dc2fc041acdbb95d97de384eb3f');
INSERT INTO audit VALUES(8,1795034146,'default','session.shared','req_01m7r5ysr13zhy5pwy2j4dfzqk','operator','operator','t','ssn_01m7r5ysndrzq0k916f2e3rd4d','sb_01m7r5ysndbdmkdtxe5c93zb1p',NULL,'shr_01m7r5ysr2fggj4n1c0n2830w8 with ann: shell_observe','node_01m7r5ysb8wtna403rvtkwyrmw',8,X'7d3bbb024910767bd8c386179ef0b7871a9a3391da0c4aae8ed259ec998caf52');
INSERT INTO audit VALUES(9,1795034146,'default','session.created','req_01m7r5ysrf4y78ze7nfz7ktavh','operator','operator','gone','ssn_01m7r5ysrfpf6xfecpkkfs45vd','sb_01m7r5ysrf85828fzwnxsd0xq6',NULL,NULL,'node_01m7r5ysb8wtna403rvtkwyrmw',9,X'0fd0679694822400aabf27b29cd3b1ca3a702c7d20cb6e2d8686e770d9564da6');
INSERT INTO audit VALUES(10,1795034146,'default','sandbox.started',NULL,NULL,NULL,NULL,NULL,'sb_01m7r5ysrf85828fzwnxsd0xq6',NULL,'local','node_01m7r5ysb8wtna403rvtkwyrmw',10,X'4bafd2fac44eb7663322f2bdb117a8ec9cc084afa9de912abaebdf2acffd4f1e');
INSERT INTO audit VALUES(11,1795034146,'default','token.issued','req_01m7r5ysrf4y78ze7nfz7ktavh','operator','operator','gone','ssn_01m7r5ysrfpf6xfecpkkfs45vd','sb_01m7r5ysrf85828fzwnxsd0xq6','tok_01m7r5yst12fz6nf9tkrmamna4','fs_read fs_write exec shell','node_01m7r5ysb8wtna403rvtkwyrmw',11,X'36e1897b735db15960a2866c6fb88f44dc69546100765ba6f2c97b30de8c84e5');
INSERT INTO audit VALUES(12,1795034146,'default','session.released','req_01m7r5ysth3rwyrjvn57dtzktc','operator','operator','gone','ssn_01m7r5ysrfpf6xfecpkkfs45vd','sb_01m7r5ysrf85828fzwnxsd0xq6',NULL,NULL,'node_01m7r5ysb8wtna403rvtkwyrmw',12,X'c3d24e1e51b6368bb1fdb00d87c4e407767224957c5dc01fa4f5c8bc1ddbb1d0');
INSERT INTO audit VALUES(13,1795034146,'default','dataplane.used','req_01m7r5ysqba35ge22bhj7kck7t','operator','operator','t','ssn_01m7r5ysndrzq0k916f2e3rd4d','sb_01m7r5ysndbdmkdtxe5c93zb1p','tok_01m7r5ysq8s01b998wngp8kqva','GET /v1/exec/ws 101','node_01m7r5ysb8wtna403rvtkwyrmw',13,X'285f71fab699a760a1026a5cb37ed5ebe98b3fce029c4cf740b77d966ebe794d');
INSERT INTO audit VALUES(14,1795034146,'default','sandbox.destroyed',NULL,NULL,NULL,NULL,NULL,'sb_01m7r5ysrf85828fzwnxsd0xq6',NULL,'it was released','node_01m7r5ysb8wtna403rvtkwyrmw',14,X'22903c6e8aeb2379a1f0965bb18fbd8eab87bdaa8f13a4510efc85264f80bc3b');
INSERT INTO audit VALUES(15,1795034146,'default','audit.heads','req_01m7r5ysy7hb00n65ceq5nfbkn','operator','operator',NULL,NULL,NULL,NULL,NULL,'node_01m7r5ysb8wtna403rvtkwyrmw',15,X'394c9cada89175981c04ac0d0d388727bbf6203f437a6fee568a6b49763aa03e');
CREATE TABLE nodes (
    id      TEXT PRIMARY KEY,
    -- How clients reach its sandboxes.
    url     TEXT NOT NULL,
    -- When it last said that it lives.
    seen_at INTEGER NOT NULL
) STRICT;
CREATE TABLE agreed (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) STRICT;
INSERT INTO agreed VALUES('master_key','NcMtBudNRPc4lr2vbqQkyg');
CREATE TABLE session_tags (
    session_id   TEXT NOT NULL REFERENCES sessions (id) ON DELETE CASCADE,
    workspace_id TEXT NOT NULL,
    key          TEXT NOT NULL,
    value        TEXT NOT NULL,
    PRIMARY KEY (session_id, key)
) STRICT;
INSERT INTO session_tags VALUES('ssn_01m7r5ysndrzq0k916f2e3rd4d','default','created_by','cobox');
INSERT INTO session_tags VALUES('ssn_01m7r5ysndrzq0k916f2e3rd4d','default','principal','operator');
INSERT INTO session_tags VALUES('ssn_01m7r5ysndrzq0k916f2e3rd4d','default','scope','thread:t');
INSERT INTO session_tags VALUES('ssn_01m7r5ysndrzq0k916f2e3rd4d','default','team','blue');
INSERT INTO session_tags VALUES('ssn_01m7r5ysrfpf6xfecpkkfs45vd','default','created_by','cobox');
INSERT INTO session_tags VALUES('ssn_01m7r5ysrfpf6xfecpkkfs45vd','default','principal','operator');
INSERT INTO session_tags VALUES('ssn_01m7r5ysrfpf6xfecpkkfs45vd','default','scope','thread:gone');
CREATE TABLE sandbox_tags (
    sandbox_id   TEXT NOT NULL REFERENCES sandboxes (id) ON DELETE CASCADE,
    workspace_id TEXT NOT NULL,
    key          TEXT NOT NULL,
    value        TEXT NOT NULL,
    PRIMARY KEY (sandbox_id, key)
) STRICT;
INSERT INTO sandbox_tags VALUES('sb_01m7r5ysndbdmkdtxe5c93zb1p','default','created_by','cobox');
INSERT INTO sandbox_tags VALUES('sb_01m7r5ysndbdmkdtxe5c93zb1p','default','principal','operator');
INSERT INTO sandbox_tags VALUES('sb_01m7r5ysndbdmkdtxe5c93zb1p','default','scope','thread:t');
INSERT INTO sandbox_tags VALUES('sb_01m7r5ysndbdmkdtxe5c93zb1p','default','team','blue');
INSERT INTO sandbox_tags VALUES('sb_01m7r5ysrf85828fzwnxsd0xq6','default','created_by','cobox');
INSERT INTO sandbox_tags VALUES('sb_01m7r5ysrf85828fzwnxsd0xq6','default','principal','operator');
INSERT INTO sandbox_tags VALUES('sb_01m7r5ysrf85828fzwnxsd0xq6','default','scope','thread:gone');
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
INSERT INTO shares VALUES('shr_01m7r5ysr2fggj4n1c0n2830w8','default','ssn_01m7r5ysndrzq0k916f2e3rd4d','ann','shell_observe','operator',1795034146,NULL);
CREATE TABLE opaque_tokens (
    hash       BLOB PRIMARY KEY CHECK (length(hash) = 32),
    claims     TEXT NOT NULL,
    -- It proves nothing any more from then on.
    keep_until INTEGER NOT NULL
) STRICT;
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
INSERT INTO events VALUES(1,1795034146,'default','sb_01m7r5ysndbdmkdtxe5c93zb1p','ssn_01m7r5ysndrzq0k916f2e3rd4d','operator','operator',0,'{"type":"created","state":"provisioning"}');
INSERT INTO events VALUES(2,1795034146,'default','sb_01m7r5ysndbdmkdtxe5c93zb1p',NULL,NULL,NULL,0,'{"type":"active"}');
INSERT INTO events VALUES(3,1795034146,'default','sb_01m7r5ysndbdmkdtxe5c93zb1p','ssn_01m7r5ysndrzq0k916f2e3rd4d','operator','operator',0,'{"type":"connected"}');
INSERT INTO events VALUES(4,1795034146,'default','sb_01m7r5ysndbdmkdtxe5c93zb1p','ssn_01m7r5ysndrzq0k916f2e3rd4d','operator','operator',0,'{"type":"shared","with":"ann","capabilities":["shell_observe"]}');
INSERT INTO events VALUES(5,1795034146,'default','sb_01m7r5ysrf85828fzwnxsd0xq6','ssn_01m7r5ysrfpf6xfecpkkfs45vd','operator','operator',0,'{"type":"created","state":"provisioning"}');
INSERT INTO events VALUES(6,1795034146,'default','sb_01m7r5ysndbdmkdtxe5c93zb1p','ssn_01m7r5ysndrzq0k916f2e3rd4d','operator','operator',1,'{"type":"exec","command":"true","exit_code":0,"duration_ms":0}');
INSERT INTO events VALUES(7,1795034146,'default','sb_01m7r5ysrf85828fzwnxsd0xq6',NULL,NULL,NULL,0,'{"type":"active"}');
INSERT INTO events VALUES(8,1795034146,'default','sb_01m7r5ysrf85828fzwnxsd0xq6','ssn_01m7r5ysrfpf6xfecpkkfs45vd','operator','operator',0,'{"type":"terminated","reason":"it was released"}');
CREATE TABLE event_marks (
    sandbox_id TEXT PRIMARY KEY REFERENCES sandboxes (id) ON DELETE CASCADE,
    life       TEXT NOT NULL DEFAULT '',
    taken      INTEGER NOT NULL DEFAULT 0,
    pruned     INTEGER NOT NULL DEFAULT 0
) STRICT;
INSERT INTO event_marks VALUES('sb_01m7r5ysndbdmkdtxe5c93zb1p','01m7r5yspsb2ayrf2p71c7evde',1,0);
CREATE TABLE audit_anchors (
    writer TEXT PRIMARY KEY,
    number INTEGER NOT NULL,
    hash   BLOB NOT NULL
) STRICT;
INSERT INTO audit_anchors VALUES('node_01m7r5ysb8wtna403rvtkwyrmw',0,X'0000000000000000000000000000000000000000000000000000000000000000');
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
, failures INTEGER NOT NULL DEFAULT 0, retry_at INTEGER, reason TEXT);
DELETE FROM sqlite_sequence;
INSERT INTO sqlite_sequence VALUES('audit',15);
INSERT INTO sqlite_sequence VALUES('events',8);
INSERT INTO sqlite_sequence VALUES('revocations',1);
CREATE UNIQUE INDEX sandboxes_by_name ON sandboxes (workspace_id, name) WHERE name IS NOT NULL AND ended_at IS NULL;
CREATE INDEX sandboxes_of_workspace ON sandboxes (workspace_id, id) WHERE ended_at IS NULL;
CREATE INDEX sandboxes_of_node ON sandboxes (node_id) WHERE ended_at IS NULL OR intent IS NOT NULL;
CREATE INDEX sandboxes_ended ON sandboxes (ended_at) WHERE ended_at IS NOT NULL;
CREATE UNIQUE INDEX sessions_by_scope ON sessions (workspace_id, scope_type, scope_id) WHERE ended_at IS NULL;
CREATE INDEX sessions_of_sandbox ON sessions (sandbox_id);
CREATE INDEX idempotency_by_age ON idempotency (created_at);
CREATE INDEX idempotency_of_session ON idempotency (session_id);
CREATE INDEX revocations_by_age ON revocations (until);
CREATE INDEX audit_by_age ON audit (at);
CREATE INDEX sandboxes_at_work ON sandboxes (node_id) WHERE state IN ('active', 'idle') OR intent IS NOT NULL;
CREATE INDEX sandboxes_suspended ON sandboxes (node_id, suspended_at) WHERE state = 'suspended';
CREATE INDEX sessions_ended ON sessions (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX audit_of_workspace ON audit (workspace_id, sequence);
CREATE INDEX session_tags_by_value ON session_tags (workspace_id, key, value, session_id);
CREATE INDEX sandbox_tags_by_value ON sandbox_tags (workspace_id, key, value, sandbox_id);
CREATE INDEX shares_of_principal ON shares (workspace_id, principal);
CREATE INDEX opaque_tokens_by_age ON opaque_tokens (keep_until);
CREATE INDEX events_of_sandbox ON events (sandbox_id, sequence);
CREATE INDEX events_of_workspace ON events (workspace_id, sequence);
CREATE INDEX events_by_age ON events (at);
CREATE UNIQUE INDEX audit_links ON audit (writer, number);
CREATE INDEX audit_by_token ON audit (jti) WHERE jti IS NOT NULL;
CREATE INDEX sandboxes_of_owner ON sandboxes (workspace_id, owner) WHERE ended_at IS NULL;
CREATE UNIQUE INDEX api_keys_of_identity ON api_keys (workspace_id, principal, hash) WHERE issuer IS NOT NULL AND is_past = 0;
CREATE INDEX api_keys_of_principal ON api_keys (workspace_id, principal);
CREATE INDEX revocations_by_value ON revocations (workspace_id, sandbox_id, kind, value);
CREATE INDEX sandboxes_of_pool ON sandboxes (pool_id) WHERE pool_id IS NOT NULL;
CREATE INDEX snapshots_by_name ON snapshots (workspace_id, name, tag, id);
CREATE INDEX snapshots_of_workspace ON snapshots (workspace_id, id);
CREATE INDEX snapshots_of_node ON snapshots (node_id) WHERE state IN ('building', 'deleting');
CREATE UNIQUE INDEX volumes_by_name ON volumes (workspace_id, name) WHERE state <> 'deleting';
CREATE INDEX volumes_of_node ON volumes (node_id) WHERE state <> 'ready';
CREATE UNIQUE INDEX pools_by_name ON pools (workspace_id, name);
CREATE INDEX sandboxes_with_own_end ON sandboxes (node_id) WHERE state = 'suspended' AND keep_suspended_seconds IS NOT NULL;
CREATE INDEX sandboxes_once_named ON sandboxes (workspace_id, name, id) WHERE name IS NOT NULL AND ended_at IS NOT NULL;
COMMIT;
