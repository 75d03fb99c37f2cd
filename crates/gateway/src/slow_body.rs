//! Why reading a request body was given up. Readers of the body find it among the causes of their error.

use std::error::Error;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooSlow {
    #[error("the body arrived at less than {0} bytes a second; send it faster, or in several requests")]
    Rate(u32),
    #[error("the body took longer than {0} seconds; send it in several requests")]
    Deadline(u32),
}

impl TooSlow {
    /// Finds the reason among the causes of an error.
    pub fn among_causes(error: &(dyn Error + 'static)) -> Option<Self> {
        let mut cause = Some(error);
        while let Some(error) = cause {
            if let Some(too_slow) = error.downcast_ref::<Self>() {
                return Some(*too_slow);
            }
            cause = error.source();
        }
        None
    }
}
