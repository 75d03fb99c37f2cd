//! Pagination of lists, newest first with the last id as cursor, and filtering by tags.

use std::str::FromStr;

use axum::extract::{FromRequestParts, Query};
use cobox_protocol::{
    ApiError,
    json::describe_parse_error,
    session::Page,
    tags::{MAX_TAG_FILTERS, TagFilter},
};
use http::request::Parts;
use serde::{Deserialize, de::DeserializeOwned};

use super::error::Failure;
use crate::store::PageParams;

const DEFAULT_LIMIT: u32 = 50;
/// Maximum number of items per page: a response stays well below 1 MiB.
const MAX_LIMIT: u32 = 200;

#[derive(Debug, Deserialize)]
pub struct PageQuery {
    pub limit: Option<String>,
    pub cursor: Option<String>,
}

impl PageQuery {
    /// A page of items with ids of type `Id`. Requests one item more than is shown, to detect whether there is another
    /// page.
    pub fn page_params<Id: FromStr>(&self) -> Result<PageParams, ApiError> {
        self.page_params_or::<Id>(DEFAULT_LIMIT)
    }

    /// Like `params`, with the given default limit.
    pub fn page_params_or<Id: FromStr>(&self, default_limit: u32) -> Result<PageParams, ApiError> {
        let limit = match &self.limit {
            None => default_limit,
            Some(said) => said
                .parse()
                .ok()
                .filter(|l| (1..=MAX_LIMIT).contains(l))
                .ok_or_else(|| ApiError::invalid(format!("limit: must be a whole number from 1 to {MAX_LIMIT}")))?,
        };
        if self.cursor.as_ref().is_some_and(|c| c.parse::<Id>().is_err()) {
            return Err(ApiError::invalid("cursor: must be the next_cursor of an earlier page"));
        }
        Ok(PageParams { before: self.cursor.clone(), limit: limit.saturating_add(1) })
    }
}

pub fn page<T>(mut items: Vec<T>, params: &PageParams, id: impl Fn(&T) -> String) -> Page<T> {
    let shown = params.limit.saturating_sub(1) as usize;
    let has_more = items.len() > shown;
    items.truncate(shown);
    let next_cursor = if has_more { items.last().map(id) } else { None };
    Page { items, next_cursor }
}

/// A query string whose errors use the error envelope.
pub struct Params<T>(pub T);

impl<T: DeserializeOwned + Send, S: Send + Sync> FromRequestParts<S> for Params<T> {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let rejected = |e: axum::extract::rejection::QueryRejection| {
            let said = e.body_text();
            let said = said.strip_prefix("Failed to deserialize query string: ").unwrap_or(&said);
            Failure::from(ApiError::invalid(describe_parse_error("the query", said)))
        };
        Query::from_request_parts(parts, state).await.map(|Query(value)| Self(value)).map_err(rejected)
    }
}

/// `tag=key:value`, repeatable; all of them must match.
pub struct TagParams(pub Vec<TagFilter>);

impl<S: Send + Sync> FromRequestParts<S> for TagParams {
    type Rejection = Failure;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Failure> {
        let Params(pairs): Params<Vec<(String, String)>> = Params::from_request_parts(parts, state).await?;
        let tags = pairs.into_iter().filter(|(name, _)| name == "tag").map(|(_, tag)| tag.parse()).collect::<Result<Vec<_>, _>>()?;
        if tags.len() > MAX_TAG_FILTERS {
            return Err(ApiError::invalid(format!("tag: has more than {MAX_TAG_FILTERS} values; send fewer")).into());
        }
        Ok(Self(tags))
    }
}
