//! Pages of a list: newest first, the cursor is the last id seen.

use axum::extract::{FromRequestParts, Query};
use cobox_protocol::{ApiError, session::Page};
use http::request::Parts;
use serde::{Deserialize, de::DeserializeOwned};

use super::error::Failure;
use crate::store::PageWish;

const DEFAULT_LIMIT: u32 = 50;
/// Largest page, in items: an answer stays well under a MiB.
const MAX_LIMIT: u32 = 200;

#[derive(Debug, Deserialize)]
pub struct PageQuery {
    pub limit: Option<u32>,
    pub cursor: Option<String>,
}

impl PageQuery {
    /// Asks for one more than is shown, to know whether there is another page.
    pub fn wish(&self) -> Result<PageWish, ApiError> {
        let limit = self.limit.unwrap_or(DEFAULT_LIMIT);
        if !(1..=MAX_LIMIT).contains(&limit) {
            return Err(ApiError::invalid(format!("limit: must be from 1 to {MAX_LIMIT}")));
        }
        Ok(PageWish { before: self.cursor.clone(), limit: limit + 1 })
    }
}

pub fn page<T>(mut items: Vec<T>, wish: &PageWish, id: impl Fn(&T) -> String) -> Page<T> {
    let shown = wish.limit.saturating_sub(1) as usize;
    let has_more = items.len() > shown;
    items.truncate(shown);
    let next_cursor = if has_more { items.last().map(id) } else { None };
    Page { items, next_cursor }
}

/// A query string whose errors come in the envelope.
pub struct Params<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let rejected = |e: axum::extract::rejection::QueryRejection| Failure::from(ApiError::invalid(e.body_text()));
        Query::from_request_parts(parts, state).await.map(|Query(value)| Self(value)).map_err(rejected)
    }
}
