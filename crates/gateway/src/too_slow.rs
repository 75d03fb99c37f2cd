//! Why a request's body was given up, as it is found again among the causes of an error of those who read it.

use std::error::Error;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TooSlow {
    #[error("the body arrived at less than {0} bytes a second; send it faster, or in several requests")]
    Rate(u32),
    #[error("the body took longer than {0} seconds; send it in several requests")]
    Deadline(u32),
}

impl TooSlow {
    pub fn among_causes(error: &(dyn Error + 'static)) -> Option<Self> {
        std::iter::successors(Some(error), |e| e.source()).find_map(|cause| cause.downcast_ref::<Self>().copied())
    }
}
