//! What runs in a sandbox, over plain HTTP: its shells and commands, and how they are told to stop.

use std::time::Duration;

use http::Method;

use crate::{ClientError, Dataplane, call::Call, path::encode_segment};

/// For one of these answers: ending a program gives it a moment to put its things in order.
const ANSWER_WITHIN: Duration = Duration::from_secs(30);

impl Dataplane {
    /// Ends a shell, by name or id, and everything in it, for everybody.
    pub async fn end_shell(&self, shell: &str) -> Result<(), ClientError> {
        self.asked(Method::DELETE, &format!("/shells/{}", encode_segment(shell.as_bytes()))).await
    }

    /// Ends a command and everything it started.
    pub async fn cancel(&self, command_id: &str) -> Result<(), ClientError> {
        self.asked(Method::DELETE, &format!("/processes/{}", encode_segment(command_id.as_bytes()))).await
    }

    async fn asked(&self, method: Method, route: &str) -> Result<(), ClientError> {
        let call = Call::new(method, self.url(route)).timeout(ANSWER_WITHIN);
        self.sender.send(&call, &self.credential).await.map(drop)
    }
}
