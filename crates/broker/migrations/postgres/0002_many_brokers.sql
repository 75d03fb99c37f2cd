-- The brokers that share this database. Each is the node of its own sandboxes.
CREATE TABLE nodes (
    id      TEXT COLLATE "C" PRIMARY KEY,
    -- How clients reach its sandboxes.
    url     TEXT COLLATE "C" NOT NULL,
    -- When it last said that it lives.
    seen_at BIGINT NOT NULL
);

-- What all brokers must have alike; the first one to say it decides.
CREATE TABLE agreed (
    name  TEXT COLLATE "C" PRIMARY KEY,
    value TEXT COLLATE "C" NOT NULL
);

-- What a broker looks at again and again, apart from all that only lies there.
CREATE INDEX sandboxes_at_work ON sandboxes (node_id) WHERE state IN ('active', 'idle') OR intent IS NOT NULL;
CREATE INDEX sandboxes_suspended ON sandboxes (node_id, suspended_at) WHERE state = 'suspended';
CREATE INDEX sessions_ended ON sessions (ended_at) WHERE ended_at IS NOT NULL;
-- Pages of one workspace's records among those of all.
CREATE INDEX audit_of_workspace ON audit (workspace_id, sequence);
