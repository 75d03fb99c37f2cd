//! Tests with a broker whose clock is set forward or back by an hour or a day: nothing stops, no caller is locked out,
//! no file is lost.

use cobox_broker::RateLimits;
use cobox_provider::DiskUsage;

use crate::harness::{World, sandbox_id, session_path};

const JUMPS: [i64; 2] = [-3600, -86_400];

#[tokio::test]
async fn a_clock_set_back_does_not_stop_the_disk_checks() {
    for jump in JUMPS {
        let world = World::new();
        let broker = world.start().await;
        let ann = broker.human("ann").await;
        let id = sandbox_id(&ann.ensure("t").await);
        broker.tick().await;
        world.clock.advance(jump);
        *world.provider.disk.lock().unwrap() = Some(DiskUsage { location: 0, used: 1000, limit: 1000 });
        broker.tick().await;
        assert!(world.provider.boxd(&id).state.lock().unwrap().disk_full, "{jump}");
    }
}

#[tokio::test]
async fn a_clock_set_back_does_not_lock_out_principals() {
    for jump in JUMPS {
        let mut world = World::new();
        world.config.rate_limits = RateLimits { requests_per_second: 1, request_burst: 3, ..RateLimits::default() };
        let broker = world.start().await;
        let ann = broker.human("ann").await;
        while ann.get("/v1/sandboxes").await.status != 429 {}
        world.clock.advance(jump);
        assert_eq!(ann.get("/v1/sandboxes").await.error(429), "RATE_LIMITED", "a clock jump must not refill the bucket");
        world.clock.advance(1);
        ann.get("/v1/sandboxes").await.ok(200);
    }
}

#[tokio::test]
async fn after_a_clock_jump_a_session_continues_with_a_fresh_token() {
    for jump in [-86_400, -3600, 3600, 86_400] {
        let world = World::new();
        let broker = world.start().await;
        let ann = broker.human("ann").await;
        let before = ann.ensure("t").await;
        world.clock.advance(jump);
        broker.tick().await;
        let after = ann.ensure("t").await;
        assert_eq!(after["session_id"], before["session_id"], "{jump}");
        let id = sandbox_id(&after);
        assert_eq!(id, sandbox_id(&before), "{jump}");
        ann.with(&after["token"]).get(&format!("/dp/{id}/v1/x")).await.ok(200);
        ann.post(&format!("{}/refresh", session_path(&after)), serde_json::json!({})).await.ok(200);
    }
}
